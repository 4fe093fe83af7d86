"""Text and binary formats: sequences, alignments, OpenFold's alignment databases, and the input files of `pack`."""
