"""How near proteins are to a set of sequences, such as those that a model was trained on."""

from collections.abc import Sequence

import pyhmmer
from pyhmmer.easel import DigitalSequence, DigitalSequenceBlock, TextSequence

from warpfold.data.search.hmmer import AMINO, LONGEST

E_VALUE = 1e-3  # of the whole set; above it a hit is taken for chance


def nearest_identities(queries: Sequence[str], sequences: Sequence[str], threads: int = 1) -> list[float]:
    """Return for each query the largest identity with any of the sequences, 0 to 1; 0 if none is a relative.

    The identity is the share of the query's residues that are the same in the local alignments with one sequence
    (phmmer, E-value at most 1e-3), so that a relative of a part counts for that part; 1 if one contains the query.
    """
    distinct = list(dict.fromkeys(sequence for sequence in sequences if 0 < len(sequence) <= LONGEST))
    whole = "\n".join(distinct)
    block = DigitalSequenceBlock(AMINO, (_digital(f"{i}", sequence) for i, sequence in enumerate(distinct)))
    asked = [_digital(f"{i}", query) for i, query in enumerate(queries)]
    found = []
    hits_of = pyhmmer.phmmer(asked, block, cpus=threads, E=E_VALUE, incE=E_VALUE)
    for query, hits in zip(queries, hits_of):
        best = len(query) if query in whole else 0
        for hit in hits.reported:
            same = set[int]()
            for domain in hit.domains.reported:
                # letters of match columns are upper case, "-" where the target has none; insertions are lower case
                aligned = [letter for letter in domain.alignment.target_sequence if not letter.islower()]
                start = domain.alignment.hmm_from - 1
                same |= {i for i, letter in enumerate(aligned, start) if letter == query[i]}
            best = max(best, len(same))
        found.append(best / max(1, len(query)))
    return found


def _digital(name: str, sequence: str) -> "DigitalSequence":
    return TextSequence(name=name, sequence=sequence).digitize(AMINO)
