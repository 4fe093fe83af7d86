"""Checks of the fast paths against the definitions of operations, and tested versions of torch and Python."""
