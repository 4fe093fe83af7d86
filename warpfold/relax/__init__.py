"""Relax structures: in memory (relax.py), of files (files.py); amber.py is all that knows OpenMM."""
