"""One protein as raw arrays: its chain, alignment and coordinates, and templates from hits."""
