"""Parse file formats: sequences, alignments, OpenFold's alignment databases, and predictions of other programs."""
