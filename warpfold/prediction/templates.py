"""Find templates for `predict`: the user's files, and hits of a search with a folder of structures."""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from warpfold.data.example.hits import Hit, read_hits
from warpfold.data.example.raw_example import Templates, concatenate_templates
from warpfold.data.example.templates import (
    LOW_IDENTITY,
    TemplateOutcome,
    count_refusals,
    template_from_file,
    templates_from_hits,
)
from warpfold.data.formats.input_files import HITS, InputFile, find
from warpfold.data.structure.chain import parse_date_option
from warpfold.data.structure.library import Library
from warpfold.errors import UserError
from warpfold.files import check_exists
from warpfold.prediction.notices import Notice, Value, noted, shorten_list

MAX_DATE = "--max-template-date"
Found = tuple[Templates | None, list[TemplateOutcome]]


@dataclass(frozen=True, kw_only=True)
class TemplateSources:
    """The files from which templates are taken.

    files: FILE or FILE:CHAIN, mmCIF or PDB, for every query, whatever their date; in a complex for the chains that they
    fit, or as ID=FILE or ID=FILE:CHAIN for chain ID.  hits: files of HHsearch or hmmsearch, or folders of these.  With
    several queries each file is named after its query (NAME.hhr), in a complex after its chain (ID.hhr, NAME_ID.hhr).
    structures: the folder of the mmCIF files that the hits refer to.  max_date: YYYY-MM-DD, hits that were released
    later are refused; None: no limit.
    """

    files: Sequence[str] = ()
    hits: Sequence[Path] = ()
    structures: Path | None = None
    max_date: str | None = None

    def __post_init__(self) -> None:
        if self.hits and self.structures is None:
            raise UserError("hits: need the mmCIF files that they name. Pass their folder (--template-structures).")
        if not self.hits and (self.structures is not None or self.max_date is not None):
            raise UserError("a template folder or date: has no effect without hits. Pass --hits, or use --template.")
        parse_date_option(self.max_date, MAX_DATE)  # raises for a wrong date

    def __bool__(self) -> bool:
        return bool(self.files or self.hits)

    @property
    def notices(self) -> list[Notice]:
        """Notices about the templates of all queries."""
        if not self.hits or self.max_date is not None:
            return []
        return noted(
            [f"no template date is given ({MAX_DATE}): hits of any date are used, even a protein's own structure"]
        )


@dataclass(frozen=True)
class TemplateQuery:
    """A sequence for which templates are sought: a protein, or the chains of a complex that share it.

    names: the names that files of hits for it may have, its own first.  files: the user's templates for it.
    """

    sequence: str
    names: tuple[str, ...]
    files: tuple[str, ...]
    chains: tuple[str, ...] = ()  # of a complex


def find_templates(
    queries: Sequence[TemplateQuery], sources: TemplateSources, most: int, refused: Collection[str] = ()
) -> list[Found]:
    """Find the templates of each query, and the outcome of each: the user's files first, then hits, up to `most`.

    refused: names of records that failed; their hits are not read.  The outcomes include hits that cannot be used.
    Errors: UserError for a user's file that cannot be used, a file of hits that cannot be read or belongs to no query,
    and a folder without the structure of any hit.
    """
    hits = _hits_by_query(queries, sources.hits, refused)
    newest = parse_date_option(sources.max_date, MAX_DATE)
    library = Library(sources.structures) if sources.structures is not None else None
    entries = [hit.pdb_id for query_hits in hits.values() for hit in query_hits]
    if library is not None and entries and not any(map(library.has, entries)):
        examples = ", ".join(f"{entry}.cif" for entry in list(dict.fromkeys(entries))[:3])
        raise UserError(
            f"{library.folders[0]}: has the structures of none of the {len(entries)} hits ({examples} ...). "
            "Pass the folder of their mmCIF files, or leave the hits out."
        )
    results: list[Found] = []
    user_results: dict[tuple[str, tuple[str, ...]], Found] = {}  # many designs share a target
    for query in queries:
        key = query.sequence, query.files
        templates, user_outcomes = user_results[key] = user_results.get(key) or user_templates(*key)
        parts, outcomes = [] if templates is None else [templates], [*user_outcomes]
        if library is not None and (offered_hits := hits.get(query.names[0])):
            limit = most - len(query.files)
            hit_templates, rejected = templates_from_hits(query.sequence, offered_hits, library, newest, limit=limit)
            parts += [] if hit_templates is None else [hit_templates]
            outcomes += rejected
        results.append((concatenate_templates(parts), outcomes))
    return results


def template_notices(outcomes: Sequence[TemplateOutcome], sources: TemplateSources) -> list[Notice]:
    """Return warnings about hits that could not be used as templates.

    Hits that were not needed, after enough better ones, cause no warning.
    """
    if not outcomes:
        return [Notice("no_hits")] if sources.hits else []
    used_count, missing = (
        sum(outcome.used for outcome in outcomes),
        [outcome for outcome in outcomes if outcome.missing],
    )
    notices = []
    if missing:
        entries = list(dict.fromkeys((outcome.name.rpartition("_")[0] or outcome.name).lower() for outcome in missing))
        values: dict[str, Value] = {"used": used_count, "offered": len(outcomes), "missing": len(missing)}
        values |= {"folder": str(sources.structures), "detail": shorten_list(entries)}
        notices.append(Notice("templates_missing", values))
    refusals = count_refusals([outcome for outcome in outcomes if not outcome.missing])
    if not used_count and refusals:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in refusals.items())
        notices.append(Notice("templates_refused", {"offered": len(outcomes), "why": reasons}))
    return notices


def files_of_chains(files: Sequence[str], chains: Mapping[str, str]) -> dict[str, list[str]]:
    """Assign the user's files to the sequences of a complex: sequence -> files.

    chains: id -> sequence.  ID=FILE belongs to the sequence of chain ID.  Otherwise FILE belongs to every sequence with
    which a chain in it shares at least 30 % of the aligned residues, and FILE:CHAIN to the one of these with which it
    shares most residues.  Errors: UserError for a file that cannot be used.
    """
    files_by_sequence: dict[str, list[str]] = {sequence: [] for sequence in chains.values()}
    for file in files:
        id, template_file = _chain_and_file(file)
        if id is None:
            shared = _fitting(template_file, files_by_sequence)
            fitting = sorted(shared, key=shared.__getitem__, reverse=True)
            if _split(template_file)[1] is not None:
                fitting = fitting[:1]
        else:
            fitting = [chains[id]] if id in chains else []
        for sequence in fitting:
            files_by_sequence[sequence].append(template_file)
    return files_by_sequence


def check_fit(files: Sequence[str], used: Iterable[Sequence[str]], chain: str) -> None:
    """Raise UserError for a user's file that is used for no chain.  chain: an example of a chain, for the message."""
    assigned = {file for files in used for file in files}
    for file in files:
        id, template = _chain_and_file(file)
        if template not in assigned:
            reason = (
                f"fewer than {LOW_IDENTITY:.0%} of the aligned residues are equal" if id is None else f"none is {id}"
            )
            raise UserError(
                f"{file}: fits no chain, as {reason}. Leave it out, or say which chain it is for: {chain}={template}"
            )


def _fitting(file: str, sequences: Iterable[str]) -> dict[str, float]:
    """Count the residues that a template shares with each of the sequences that it fits."""
    fitting, refused = {}, []
    for sequence in sequences:
        try:
            _, (outcome,) = user_templates(sequence, [file])
        except UserError as error:
            refused.append(error)
            continue
        if outcome.identity >= LOW_IDENTITY:
            fitting[sequence] = outcome.identity * outcome.residues
    if len(refused) == len(tried := list(sequences)) and tried:
        raise refused[0]
    return fitting


def user_templates(sequence: str, files: Sequence[str | Path]) -> Found:
    """Read templates, each FILE or FILE:CHAIN, and align them to a sequence.

    Errors: as in `data.example.templates.template_from_file`.
    """
    templates, outcomes = [], []
    for file in files:
        template, outcome = template_from_file(sequence, *_split(str(file)))
        templates.append(template)
        outcomes.append(outcome)
    return concatenate_templates(templates), outcomes


def check_template_file(file: str) -> None:
    """Raise UserError if the file of FILE, FILE:CHAIN or ID=FILE does not exist."""
    check_exists(Path(_split(_chain_and_file(file)[1])[0]))


def _chain_and_file(file: str) -> tuple[str | None, str]:
    """Split ID=FILE into chain and file; FILE, whose name may contain "=", has no chain."""
    id, separator, path = file.partition("=")
    return (id, path) if separator and not os.path.exists(_split(file)[0]) else (None, file)


def _split(file: str) -> tuple[str, str | None]:
    """Split FILE:CHAIN into path and chain; FILE, whose name may contain ":", has no chain."""
    path, colon, chain = file.rpartition(":")
    return (file, None) if not colon or os.path.exists(file) else (path, chain)


def _hits_by_query(
    queries: Sequence[TemplateQuery], given: Sequence[Path], refused: Collection[str]
) -> dict[str, list[Hit]]:
    """Read the hits of each query, by its first name; with one query, all files belong to it.

    Files in a folder that belong to no query or to a refused name are skipped.
    """
    only_query = queries[0] if len(queries) == 1 and not refused else None
    by_name = {name: query for query in queries for name in query.names}
    in_any_case = {name.lower(): query for name, query in by_name.items()}
    hits: dict[str, list[Hit]] = {}
    for path in given:
        for file in _hit_files(path):
            # The file or its folder has the name: AlphaFold-Multimer's msas/A/pdb_hits.sto, OpenProteinSet's A/hhr/.
            stem, folder = file.path.name.split(".")[0], file.path.absolute().parent.name
            by_folder = (in_any_case.get(name) for name in sorted(file.protein_names))
            matching = filter(None, (by_name.get(stem), by_name.get(folder), *by_folder))
            query = only_query if only_query is not None and not path.is_dir() else next(matching, None)
            if query is not None:
                hits.setdefault(query.names[0], []).extend(read_hits(file.path, query.sequence))
            elif not path.is_dir() and stem not in refused:
                raise UserError(
                    f"{path}: there is no query {path.name.split('.')[0]}. With several queries, name each file of "
                    f"hits by its query ({queries[0].names[0]}.hhr)."
                )
        if path.is_dir() and not hits:
            raise UserError(
                f"{path}: has no hits that are named after a query. Call them {queries[0].names[0]}.hhr, "
                f"or put them into a folder {queries[0].names[0]}."
            )
    return hits


def _hit_files(path: Path) -> list[InputFile]:
    """List the files of hits in a folder, .hhr files and alignments with certain names; a file is its own list."""
    if not path.is_dir():
        return [InputFile(str(path), path)]
    return [file for file in find([path], HITS, "template hits") if file.is_hits]
