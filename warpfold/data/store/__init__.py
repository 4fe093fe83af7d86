"""The packed store, and examples in it."""
