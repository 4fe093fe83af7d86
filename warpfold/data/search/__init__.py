"""Search for alignments and template hits: jackhmmer and hmmsearch in this process, MMseqs2 and HH-suite outside."""
