"""Compute the identity of proteins with a set of sequences, such as the training set of a model."""

from collections.abc import Sequence

import pyhmmer
from pyhmmer.easel import DigitalSequence, DigitalSequenceBlock, TextSequence

from warpfold.data.search.hmmer import AMINO, MAX_RESIDUES

# Largest E-value in the whole set. Hits above it count as chance.
E_VALUE = 1e-3


def nearest_identities(queries: Sequence[str], sequences: Sequence[str], threads: int = 1) -> list[float]:
    """Compute for each query the largest identity with any of the sequences, 0 to 1; 0 without a relative.

    The identity is the fraction of the query's residues that are equal in the local alignments with one sequence
    (phmmer, E-value at most 1e-3), so a relative of a fragment counts for that fragment. It is 1 if a sequence contains
    the query.
    """
    unique = list(dict.fromkeys(sequence for sequence in sequences if 0 < len(sequence) <= MAX_RESIDUES))
    joined = "\n".join(unique)
    block = DigitalSequenceBlock(AMINO, (_digital(f"{i}", sequence) for i, sequence in enumerate(unique)))
    digital_queries = [_digital(f"{i}", query) for i, query in enumerate(queries)]
    identities = []
    all_hits = pyhmmer.phmmer(digital_queries, block, cpus=threads, E=E_VALUE, incE=E_VALUE)
    for query, hits in zip(queries, all_hits):
        best = len(query) if query in joined else 0
        for hit in hits.reported:
            same = set[int]()
            for domain in hit.domains.reported:
                # Insertions are lower case. Match columns are upper case, or "-" where the target has a gap.
                aligned = [letter for letter in domain.alignment.target_sequence if not letter.islower()]
                start = domain.alignment.hmm_from - 1
                same |= {i for i, letter in enumerate(aligned, start) if letter == query[i]}
            best = max(best, len(same))
        identities.append(best / max(1, len(query)))
    return identities


def _digital(name: str, sequence: str) -> "DigitalSequence":
    """Convert a sequence for pyhmmer."""
    return TextSequence(name=name, sequence=sequence).digitize(AMINO)
