"""Runs on paper: the schedule that the code has, replayed on clusters that nobody has at hand."""
