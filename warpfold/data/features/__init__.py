"""From one example to the arrays that the model reads: choose, read, compute."""
