"""Time operations, models and loaders, and tell what a machine can do."""
