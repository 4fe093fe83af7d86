"""The way of one protein from file to batch, in rooms whose imports go one way; CONTRIBUTING.md tells it.

formats, structure, similar, example, store, features, load; beside them pack, search and synthetic.
"""
