"""Make what `Predictor.fold` is given into queries: sequences, rows or files of alignments, templates."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from warpfold.arguments import PathLike, path_or_none, paths, text_or_none
from warpfold.data.example.assembly import Assembly
from warpfold.data.example.complexes import listed
from warpfold.data.example.raw_example import RawExample, Templates
from warpfold.data.features.choose import SampleConfig, choose_templates
from warpfold.errors import UserError
from warpfold.prediction.notices import Notice
from warpfold.prediction.outputs import Prediction
from warpfold.prediction.params import Params, check_templates
from warpfold.prediction.queries import (
    Query,
    with_templates,
)
from warpfold.prediction.read_out import Prepared
from warpfold.prediction.templates import TemplateSources
from warpfold.report.coverage import entities_of, seen_rows

log = logging.getLogger("warpfold")

TemplatesLike = Templates | PathLike | Sequence[PathLike] | None


def add_templates(
    query: Query, model: Params, templates: TemplatesLike, hits: Any, structures: Any, max_date: str | None
) -> Query:
    """Return a query with templates for a model; what is found of each that was offered goes with it.

    templates: files, FILE or FILE:CHAIN (in a complex also ID=FILE), or, of a single sequence, `Templates`.  hits,
    structures, max_date: as of `TemplateSources`.
    Errors: UserError as of `with_templates`.
    """
    if isinstance(templates, Templates):
        if query.is_complex:
            raise UserError("templates of a complex: give their files, [ID=]FILE or [ID=]FILE:CHAIN")
        check_templates(model.config, model.sample, len(templates))
        query, templates = replace(query, chains=(replace(query.chains[0], templates=templates),)), None
    sources = TemplateSources(
        files=[str(file) for file in paths("templates", templates)],
        hits=paths("hits", hits),
        structures=path_or_none("template_structures", structures),
        max_date=text_or_none("max_template_date", max_date),
    )
    if not sources:
        return query
    (found,) = with_templates([query], sources, [model])
    return replace(found, notices=[*sources.notices, *found.notices])


def with_warnings(query: Query, prediction: Prediction) -> Prediction:
    """Return a prediction with what became of its templates, and what is to be said of its input, which is logged."""
    warnings = [*(notice.record() for notice in query.notices), *prediction.details.get("warnings", ())]
    for warning in warnings:
        log.warning("%s: %s", query.name, warning["text"])
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
        found["warnings"] = [Notice("rows_lost", {"of": of}).record()]
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
