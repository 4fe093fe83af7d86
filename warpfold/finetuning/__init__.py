"""Fine-tune a model on the user's structures, and report whether it became better."""
