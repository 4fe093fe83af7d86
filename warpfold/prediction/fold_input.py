"""Make what `Predictor.fold` is given into queries: sequences, rows or files of alignments, templates."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from warpfold.arguments import PathLike, WrongArgument, is_list, path_or_none, paths, shown, text_or_none
from warpfold.data.example.assembly import Assembly, Example
from warpfold.data.example.complexes import Complex, assemble, chain_ids, listed
from warpfold.data.example.raw_example import RawExample, Templates
from warpfold.data.features.choose import SampleConfig, choose_templates
from warpfold.data.formats.alignment import Alignment, encode
from warpfold.data.formats.chain_alignments import read_chain_alignments
from warpfold.data.formats.sequences import parse_a3m
from warpfold.errors import UserError
from warpfold.prediction.outputs import Prediction
from warpfold.prediction.params import Params, check_templates
from warpfold.prediction.queries import (
    ComplexQuery,
    FetchAlignments,
    Query,
    lacking_of,
    of_none,
    single_query,
    with_templates,
)
from warpfold.prediction.read_out import Prepared
from warpfold.prediction.templates import TemplateSources
from warpfold.report.coverage import entities_of, seen_rows

log = logging.getLogger("warpfold")

Sequences = str | Sequence[str] | Mapping[str, str]  # of a protein, or of the chains of a complex
Rows = Alignment | Sequence[str]  # of one sequence, as A3M has them
OfChain = Rows | PathLike | Sequence[PathLike] | None
Alignments = OfChain | Sequence[OfChain] | Mapping[str, OfChain]
TemplatesLike = Templates | PathLike | Sequence[PathLike] | None


def query_of(sequence: Sequences, alignment: Alignments, name: str, fetch: FetchAlignments | None = None) -> Query:
    """Return a protein, or a complex of several chains, with its alignments.

    sequence: one letter per residue; A:B, a list, or chain -> sequence for a complex.  alignment: rows, an `Alignment`,
    or files; of a complex one for each chain in their order, chain -> alignment, or files, each of the chain that is
    its first row.  fetch: gets alignments of sequences that have none.
    Errors: WrongArgument for what is nothing of these; UserError for letters that are not residues, files that cannot
    be read, and rows that do not fit.
    """
    chains = _chains(sequence, name)
    if isinstance(chains, str):
        encode(chains, name)  # an error for letters that are not residues
        notes: list[str] = []
        own = _of_chain(chains, alignment, name, notes)
        if fetch is not None and not own:
            fetched = fetch([(Complex(name, ("A",), (chains,)), [chains])])
            own = read_chain_alignments(fetched, [chains], name).of(chains)
        query = single_query(name, chains, own)
        return replace(query, warnings=[*notes, *query.warnings])
    for id, letters in chains.items():
        encode(letters, f"{name} {id}")
    files = None
    if _is_path(alignment) or _is_paths(alignment):
        files = read_chain_alignments(paths("alignment", alignment), chains.values(), name)
    cut = [*files.notes, *of_none(files.unused)] if files else []
    found = () if files else _of_chains(chains, alignment, name, cut)
    given = Complex(name, tuple(chains), tuple(chains.values()), found)
    if fetch is not None and (without := lacking_of(given, files)):
        answers = read_chain_alignments(fetch([(given, without)]), chains.values(), name)
        files = answers if files is None else files.joined(answers)
    assembly, notes = assemble(given, files)
    return ComplexQuery(assembly, warnings=[*cut, *notes] if found or files else ())  # what was given, and is not used


def _chains(sequence: Any, name: str) -> str | dict[str, str]:
    """Return the letters of a protein, or of the chains of a complex by their names."""
    if isinstance(sequence, str):
        if not sequence.strip():
            raise UserError(f"{name}: the sequence has no residues; give a letter for each")
        if not set(sequence).isdisjoint("./"):
            raise UserError(f"{name}: sequence = {shown(sequence)}: is no sequence; a file is folded by fold_many")
        if ":" not in sequence:
            return sequence.upper()
        sequence = sequence.split(":")
    if not isinstance(sequence, Mapping) and not is_list(sequence):
        what = "a text is needed, or those of the chains of a complex; files: fold_many"
        raise WrongArgument(f"sequence = {shown(sequence)}: {what}")
    if not sequence:
        raise UserError(f"{name}: sequence = {shown(sequence)}: has no chains; give one at least")
    named = sequence if isinstance(sequence, Mapping) else dict(zip(chain_ids(len(sequence)), sequence))
    for id, letters in named.items():
        if not isinstance(letters, str) or not isinstance(id, str):
            raise WrongArgument(f"{name}: chain {id} = {shown(letters)}: a text is needed")
    return {id: letters.upper() for id, letters in named.items()}


def _of_chains(chains: Mapping[str, str], given: Any, name: str, notes: list[str]) -> tuple[Alignment, ...]:
    """Return the alignments of a complex, given chain by chain.  notes: gets what is to be said of their files."""
    if given is not None and not isinstance(given, Mapping) and not is_list(given):
        raise WrongArgument(f"alignment = {shown(given)}: files, a list or a mapping of chains is needed")
    given = () if given is None else given
    each = given if isinstance(given, Mapping) else dict(zip(chains, given))
    if unknown := [id for id in each if id not in chains]:
        raise UserError(f"{name}: an alignment for chain {unknown[0]}, but the chains are {', '.join(chains)}")
    if not chains or len(each) < len(given):
        raise UserError(f"{name}: {len(chains)} chains and {len(given)} alignments; give one for each, or none")
    return tuple(one for id, rows in each.items() for one in _of_chain(chains[id], rows, f"{name} {id}", notes))


def _of_chain(sequence: str, given: Any, name: str, notes: list[str]) -> list[Alignment]:
    """Return the alignments of one sequence: of rows, as in A3M, one, in which the sequence may be or not."""
    if given is None:
        return []
    if isinstance(given, Alignment):
        return [given.check_query(sequence, name)]
    if _is_path(given) or (_is_paths(given) and not any(isinstance(one, str) for one in given)):  # texts are rows
        read = read_chain_alignments(paths("alignment", given), [sequence], name)
        notes += [*read.notes, *of_none(read.unused)]
        return read.of(sequence)
    if not is_list(given) or not all(isinstance(row, str) for row in given):
        raise WrongArgument(f"{name}: alignment = {shown(given)}: rows, an Alignment, or files are needed")
    if not given:
        return []
    text = "".join(f">alignment[{i}]\n{row}\n" for i, row in enumerate(given))
    return [parse_a3m(f">{name}\n{sequence}\n{text}", name, sequence)]


def _is_path(given: Any) -> bool:
    return isinstance(given, str | os.PathLike)


def _is_paths(given: Any) -> bool:
    return is_list(given) and len(given) > 0 and all(map(_is_path, given))


def add_templates(
    query: Query, model: Params, templates: TemplatesLike, hits: Any, structures: Any, max_date: str | None
) -> Query:
    """Return a query with templates for a model; what is found of each that was offered goes with it.

    templates: files, FILE or FILE:CHAIN (in a complex also ID=FILE), or, of a single sequence, `Templates`.  hits,
    structures, max_date: as of `TemplateSources`.
    Errors: UserError as of `with_templates`.
    """
    if isinstance(templates, Templates):
        if isinstance(query, ComplexQuery):
            raise UserError("templates of a complex: give their files, [ID=]FILE or [ID=]FILE:CHAIN")
        check_templates(model.config, model.sample, len(templates))
        query, templates = replace(query, templates=templates), None
    sources = TemplateSources(
        files=[str(file) for file in paths("templates", templates)],
        hits=paths("hits", hits),
        structures=path_or_none("template_structures", structures),
        max_date=text_or_none("max_template_date", max_date),
    )
    if not sources:
        return query
    (found,) = with_templates([query], sources, [model])
    return replace(found, warnings=[*sources.warnings, *found.warnings])


def said_of(query: Query, prediction: Prediction) -> Prediction:
    """Return a prediction with what became of its templates, and what is to be said of its input, which is logged."""
    warnings = [*query.warnings, *prediction.details.get("warnings", ())]
    for warning in warnings:
        log.warning("%s: %s", query.name, warning)
    details = {**prediction.details, **({"warnings": warnings} if warnings else {})}
    return replace(prediction, templates=[asdict(outcome) for outcome in query.outcomes], details=details)


def depths_of(prepared: Prepared) -> dict[str, Any]:
    """Return how many alignment rows the model sees: in all; of a complex, with residues of each chain, and pairs.

    And how many were given (`msa_given`), and a warning about chains that none of those given reached.
    """
    assembly, rows = prepared.assembly, seen_rows(prepared.batch)
    there = entities_of(rows, assembly)
    depths = dict(zip(assembly.ids, there.sum(0)[assembly.entity_id - 1].tolist()))
    given = {chain.sequence: chain.depth for chain in assembly.chains}
    found: dict[str, Any] = {"msa_depth": len(rows), "msa_given": sum(given.values())}
    if len(assembly.chains) > 1:
        found |= {"chain_depths": depths, "paired_rows": int((there.sum(1) > 1).sum() - (there.shape[1] > 1))}
    lost = [id for id, chain in zip(assembly.ids, assembly.chains) if depths[id] < 2 <= chain.depth]
    if lost:
        of = f" for {listed(lost)}" if len(assembly.chains) > 1 else ""
        found["warnings"] = [f"no row of the alignment{of} reached the model: folded by the sequence alone"]
    return found


def details_of(prepared: Prepared, recycles: int, seconds: float, sample: SampleConfig | None) -> dict[str, Any]:
    """Return what the summary says of how an example was folded, in so many seconds.

    sample: how templates are chosen; None for a model that takes none.
    """
    return {
        "seed": prepared.seed,
        "recycles": recycles,
        "ensemble": prepared.ensemble,
        **depths_of(prepared),
        "templates": [] if sample is None else _used_templates(prepared.assembly, sample),
        "seconds": {"features": round(prepared.seconds, 3), "model": round(seconds, 3)},
    }


def _used_templates(assembly: Assembly, sample: SampleConfig) -> list[str]:
    """Return the names of the templates that a model sees, chain by chain, copies once."""
    used: list[str] = []
    for chain in {chain.sequence: chain for chain in assembly.chains}.values():
        if isinstance(chain, RawExample) and chain.templates is not None:
            chosen = choose_templates(len(chain.templates), sample.max_templates, None)
            used += chain.templates.choose(chosen).names
    return used


def without_atoms(chain: Example) -> Example:
    """Return a chain without its coordinates, where they are in memory."""
    return replace(chain, positions=None, mask=None) if isinstance(chain, RawExample) else chain
