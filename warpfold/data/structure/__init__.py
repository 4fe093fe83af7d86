"""Read and write protein structures (mmCIF, PDB)."""
