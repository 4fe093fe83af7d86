"""The fast paths on a CPU: torch's own operations on blocks of rows that stay in cache."""
