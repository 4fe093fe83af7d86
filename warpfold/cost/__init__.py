"""Count what steps and predictions cost, and plan them."""
