"""Search for alignments and template hits with jackhmmer, hmmsearch, MMseqs2, HH-suite or a server."""
