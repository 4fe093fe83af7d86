"""Build raw examples: arrays of chain, alignment, coordinates and templates, before features are computed."""
