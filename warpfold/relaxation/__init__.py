"""Relax structures: relax.py in memory, files.py in files and folders; amber.py is the interface to OpenMM."""
