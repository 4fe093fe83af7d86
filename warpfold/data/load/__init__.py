"""From stores to batches: which example comes when, the processes that make them, the loader."""
