"""Make the arrays that the model reads from one example: choose, read, compute."""
