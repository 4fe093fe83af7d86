"""Make what `Predictor.fold` is given into examples: sequences, rows of alignments, files of templates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from warpfold.data.example.assembly import Assembly, Example
from warpfold.data.example.complexes import Complex, assemble, chain_ids
from warpfold.data.example.pairing import pair_rows
from warpfold.data.example.raw_example import RawExample
from warpfold.data.formats.alignment import Alignment, encode
from warpfold.data.formats.sequences import parse_a3m
from warpfold.errors import UserError
from warpfold.run.predict_templates import check_fit, files_of_chains, user_templates

Rows = Alignment | Sequence[str]  # of one sequence, as A3M has them


def as_alignment(sequence: str, rows: Rows, name: str) -> Alignment:
    """Return rows aligned to a sequence, as in A3M, as its alignment; the sequence may be among them or not.

    Errors: UserError for letters that are not residues, and rows that do not fit.
    """
    encode(sequence, name)  # an error for letters that are not residues
    if isinstance(rows, Alignment):
        return rows
    text = "".join(f">alignment[{i}]\n{row}\n" for i, row in enumerate(rows))
    return parse_a3m(f">{name}\n{sequence.upper()}\n{text}", name, sequence.upper())


def complex_of(
    sequences: Sequence[str] | Mapping[str, str], alignments: Sequence[Rows] | Mapping[str, Rows], name: str
) -> Assembly:
    """Return the chains of a complex, A, B ... or by name, with their alignments.

    Errors: UserError as in `as_alignment`, and for alignments that belong to no chain.
    """
    ids = list(sequences) if isinstance(sequences, Mapping) else chain_ids(len(sequences))
    chains = dict(zip(ids, sequences.values() if isinstance(sequences, Mapping) else sequences))
    given = alignments if isinstance(alignments, Mapping) else dict(zip(ids, alignments))
    if unknown := [id for id in given if id not in chains]:
        raise UserError(f"{name}: an alignment for chain {unknown[0]}, but the chains are {', '.join(chains)}")
    if not chains or len(given) < len(alignments):
        raise UserError(f"{name}: {len(chains)} chains and {len(alignments)} alignments; give one for each, or none")
    for id, sequence in chains.items():
        encode(sequence, f"{name} {id}")  # an error for letters that are not residues
    found = tuple(as_alignment(chains[id], rows, f"{name} {id}") for id, rows in given.items() if len(rows))
    upper = tuple(sequence.upper() for sequence in chains.values())
    return assemble(Complex(name, tuple(chains), upper, found))[0]


def on_chains(assembly: Assembly, files: Sequence[str], check: Callable[[int], None]) -> Assembly:
    """Return a complex with templates on the chains that they fit.  check: refuses more than the model takes.

    Errors: UserError as in `files_of_chains` and `check_fit`.
    """
    sequences = {id: chain.sequence for id, chain in zip(assembly.ids, assembly.chains)}
    own = files_of_chains(files, sequences)
    check_fit(files, [*own.values()], assembly.ids[0])
    chains = []
    for chain in assembly.chains:
        assert isinstance(chain, RawExample)
        check(len(own[chain.sequence]))
        chains.append(replace(chain, templates=user_templates(chain.sequence, own[chain.sequence])[0]))
    return replace(assembly, chains=tuple(chains))


def depths_of(assembly: Assembly) -> dict[str, Any]:
    """Return how many alignment rows there are: in all, copies counted once; of a complex, of each chain, and pairs."""
    depth = sum({chain.sequence: chain.depth for chain in assembly.chains}.values())
    if len(assembly.chains) == 1:
        return {"msa_depth": depth}
    depths = {id: chain.depth for id, chain in zip(assembly.ids, assembly.chains)}
    several = assembly.entity_id.max() > 1
    pairs = len(pair_rows([chain.pairing for chain in assembly.chains])) - 1 if several else 0
    return {"msa_depth": depth, "chain_depths": depths, "paired_rows": pairs}


def without_atoms(chain: Example) -> Example:
    """Return a chain without its coordinates, where they are in memory."""
    return replace(chain, positions=None, mask=None) if isinstance(chain, RawExample) else chain
