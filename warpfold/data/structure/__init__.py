"""Protein structures: chains, read from mmCIF and PDB files, and written to them."""
