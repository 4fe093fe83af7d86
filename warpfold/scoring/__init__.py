"""Compare structures: lDDT, TM and GDT (metrics.py), interfaces (score_complex.py, dockq.py), chain_mapping.py."""
