"""Check operations against their definitions: cases of every operation, and the errors of the fast paths; and which
versions of torch and Python were tested.
"""
