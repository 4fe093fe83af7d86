"""Fold many proteins from Python, by the loop of `warpfold predict`: nothing is written, and a failure is a result."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warpfold.arguments import WrongArgument, is_list, paths, progress_of, queries, shown
from warpfold.data.example.query_files import Given
from warpfold.errors import UserError
from warpfold.parallel.team import Team
from warpfold.prediction.fold_input import with_warnings
from warpfold.prediction.fold_options import Kept
from warpfold.prediction.folding import FoldItem, FoldOutcome, fold_groups, in_groups
from warpfold.prediction.outputs import Prediction
from warpfold.prediction.params import Params
from warpfold.prediction.predictor import Predictor
from warpfold.prediction.queries import FetchAlignments, Query, query_of, read_given
from warpfold.progress import Progress


@dataclass(frozen=True, repr=False)
class FoldResult:
    """What became of one protein: a prediction, or why there is none; neither on ranks that do not hold it."""

    name: str
    prediction: Prediction | None = None
    error: str = ""

    def __repr__(self) -> str:
        """Return it in one line."""
        return f"<FoldResult {self.name}: {self.error or self.prediction!r}>"


@dataclass(frozen=True)
class _Options:
    recycles: int | None
    ensemble: int | None
    kept: Kept


@dataclass(frozen=True)
class _Loaded:
    """A model that is in memory already."""

    predictor: Predictor
    options: _Options
    team: Team

    def load(self, params: Params) -> Predictor:
        return self.predictor


def fold_many(
    predictor: Predictor,
    sequences: Any,
    alignments: Any,
    templates: Any,
    numbers: Mapping[str, Any],
    kept: Kept,
    batch: int | None,
    fetch: FetchAlignments | None = None,
    progress: Progress | None = None,
) -> list[FoldResult]:
    """Fold many proteins, as `Predictor.fold_many`.

    numbers: seed, recycles and ensemble.  batch: None for "auto".  fetch: gets alignments of those that have none.
    """
    from warpfold.data.search.server import ServerGone

    tell, results = progress_of(progress), {}
    asked: list[Query] = []
    given = _given(predictor, sequences, alignments, templates, fetch)
    for name, one, aligned, offered in given:
        try:
            if isinstance(one, UserError):
                raise one
            query = query_of(one, aligned, name, fetch) if not isinstance(one, Query) else one
            asked.append(predictor.with_templates(query, offered))
        except (WrongArgument, ServerGone):  # no other protein would be better off
            raise
        except UserError as error:
            results[name] = FoldResult(name, error=str(error))
    model, total = predictor.as_params, len(given)
    items = [FoldItem(model, query, numbers["seed"]) for query in asked]
    alone = predictor.team.process.ranks > 1 or predictor.recycling.ends_early or predictor.dropout
    alone = alone or kept.save_recycles
    groups = in_groups(items, 1 if alone else batch, str(predictor.device))
    tell(len(results), total, "folding")

    def record(outcome: FoldOutcome) -> None:
        prediction = outcome.entry["prediction"] if outcome.entry else None
        name = outcome.item.query.name
        results[name] = FoldResult(name, prediction, outcome.error)
        tell(len(results), total, name)

    def write(item: FoldItem, prediction: Prediction) -> dict[str, Any]:
        return {"prediction": with_warnings(item.query, prediction)}

    options = _Options(numbers["recycles"], numbers["ensemble"], kept)
    fold_groups(_Loaded(predictor, options, predictor.team), groups, write, record)
    return [results[name] for name, *_ in given]


def _given(
    predictor: Predictor, sequences: Any, alignments: Any, templates: Any, fetch: FetchAlignments | None
) -> list[tuple[str, Any, Any, Any]]:
    """Return name, sequence, alignment and templates of each; of a file its queries, or why there is none."""
    if (files := _files_of(sequences)) is not None:
        together = predictor.model.config.multimer is not None
        read = read_given(files, paths("alignments", alignments), together, fetch, predictor.check)
        for notice in read.notices:
            logging.getLogger("warpfold").warning("%s", notice.text)
        offered = _each("templates", templates, [*read.found])
        return [(name, one, None, offered[name]) for name, one in read.found.items()]
    if not isinstance(sequences, Mapping) and not is_list(sequences):
        raise WrongArgument(f"sequences = {shown(sequences)}: a list, name -> sequence, or a file is needed")
    named = sequences if isinstance(sequences, Mapping) else {f"query_{i}": one for i, one in enumerate(sequences, 1)}
    if wrong := [name for name in named if not isinstance(name, str) or not name]:
        raise WrongArgument(f"sequences: the name {shown(wrong[0])}: a text is needed")
    aligned, offered = _each("alignments", alignments, list(named)), _each("templates", templates, list(named))
    return [(name, one, aligned[name], offered[name]) for name, one in named.items()]


def _files_of(sequences: Any) -> list[Given] | None:
    """Return the files, folders and texts that are read as by `warpfold predict`; None for sequences themselves.

    Of a list with a file in it, every text is a file's name or a sequence.
    """
    if isinstance(sequences, str | os.PathLike):
        if isinstance(sequences, str) and sequences != "-" and not Path(sequences).exists():
            raise WrongArgument(f"sequences = {shown(sequences)}: no such file; give a list for sequences: [...]")
        return [sequences if sequences == "-" else Path(sequences)]
    if is_list(sequences) and any(map(_is_file, sequences)):
        return [Path(one) if _is_file(one) else one for one in queries("sequences", sequences)]
    return None


def _is_file(one: Any) -> bool:
    """Return whether this is a file's name, and no sequence: letters, * and - alone."""
    return isinstance(one, os.PathLike) or (isinstance(one, str) and not set(one).isdisjoint("./"))


def _each(what: str, given: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return what was given for each name: by name, or in the order of the names; nothing for all."""
    if given is None or (is_list(given) and not given):
        return dict.fromkeys(names)
    if isinstance(given, Mapping):
        if unknown := [name for name in given if name not in names]:
            raise WrongArgument(f"{what}: there is no {unknown[0]} among the sequences")
        return {name: given.get(name) for name in names}
    if not is_list(given):
        raise WrongArgument(f"{what} = {shown(given)}: a list is needed, one for each sequence, or name -> ... of some")
    if (count := len(given)) != len(names):
        raise WrongArgument(f"{what}: {count} for {len(names)} sequences; give one for each, or name -> ... of some")
    return dict(zip(names, given))
