"""Write and read packed stores, and the examples in them."""
