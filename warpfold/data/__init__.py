"""Convert protein files to batches of features.

The subpackages import only from those before them: formats, structure, similar, example, store, features, load. pack
builds stores, search makes alignments, and synthetic generates sample proteins. CONTRIBUTING.md has an overview.
"""
