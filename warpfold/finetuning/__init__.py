"""Fine-tuning: from structures of one's own to a model that is better on them, and the proof that it is."""
