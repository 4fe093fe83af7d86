"""Load examples from stores: their order, and the worker processes that compute them."""
