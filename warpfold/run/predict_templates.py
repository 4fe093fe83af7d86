"""Find templates for `predict`: files that the user gives, and hits of a search with a folder of structures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from warpfold.data.example.hits import Hit, read_hits
from warpfold.data.example.raw_example import Templates, join
from warpfold.data.example.templates import TemplateOutcome, template_from_file, templates_from_hits
from warpfold.data.structure.chain import given_date
from warpfold.data.structure.library import Library
from warpfold.errors import UserError

MAX_DATE = "--max-template-date"
Found = tuple[Templates | None, list[TemplateOutcome]]


@dataclass(frozen=True, kw_only=True)
class TemplateSources:
    """The files from which templates are taken.

    files: FILE or FILE:CHAIN, mmCIF or PDB, used for every query whatever their date.  hits: files of HHsearch or
    hmmsearch; with several queries each is named after its query (NAME.hhr).  structures: the mmCIF files that hits
    point to.  max_date: YYYY-MM-DD, hits whose entry came out later are refused; None: no limit.
    """

    files: Sequence[str] = ()
    hits: Sequence[Path] = ()
    structures: Path | None = None
    max_date: str | None = None

    def __post_init__(self) -> None:
        if self.hits and self.structures is None:
            raise UserError("hits need the mmCIF files they point to; give their folder (--template-structures)")
        if not self.hits and (self.structures is not None or self.max_date is not None):
            raise UserError("a template folder or date has no effect without hits; give --hits, or use --template")
        given_date(self.max_date, MAX_DATE)  # a wrong one is an error before any work is done

    def __bool__(self) -> bool:
        return bool(self.files or self.hits)


def find_templates(queries: Mapping[str, str], sources: TemplateSources, most: int) -> dict[str, Found]:
    """Find each query's templates and the outcome of each: the user's files first, then hits, up to `most`.

    queries: name -> sequence.  A hit that cannot be used is among the outcomes.
    Errors: UserError for a file of the user that cannot be used, a file of hits that cannot be read or belongs to no
    query, and a folder that has the structure of none of the hits.
    """
    hits = _hits_by_query(queries, sources.hits)
    newest = given_date(sources.max_date, MAX_DATE)
    library = Library(sources.structures) if sources.structures is not None else None
    entries = [hit.pdb_id for each in hits.values() for hit in each]
    if library is not None and entries and not any(map(library.has, entries)):
        some = ", ".join(f"{entry}.cif" for entry in list(dict.fromkeys(entries))[:3])
        raise UserError(
            f"{library.folder}: has the structures of none of the {len(entries)} hits ({some} ...); give the folder of "
            "their mmCIF files, or leave the hits out"
        )
    found: dict[str, Found] = {}
    for name, sequence in queries.items():
        own, outcomes = user_templates(sequence, sources.files)
        parts = [] if own is None else [own]
        if library is not None and hits.get(name):
            searched, refused = templates_from_hits(
                sequence, hits[name], library, newest, limit=most - len(sources.files)
            )
            parts += [] if searched is None else [searched]
            outcomes += refused
        found[name] = join(parts), outcomes
    return found


def user_templates(sequence: str, files: Sequence[str | Path]) -> Found:
    """Read the templates in `files`, each FILE or FILE:CHAIN, aligned to a sequence, in that order.

    Errors: as in `data.example.templates.template_from_file`.
    """
    templates, outcomes = [], []
    for file in files:
        path, colon, chain = str(file).rpartition(":")
        whole = not colon or Path(file).exists()  # a file's own name may have a colon
        template, outcome = template_from_file(sequence, file if whole else path, None if whole else chain)
        templates.append(template)
        outcomes.append(outcome)
    return join(templates), outcomes


def _hits_by_query(queries: Mapping[str, str], files: Sequence[Path]) -> dict[str, list[Hit]]:
    """Read the hits of each query; if there is one query, all files are its own."""
    hits: dict[str, list[Hit]] = {}
    for file in files:
        name = next(iter(queries)) if len(queries) == 1 else file.name.split(".")[0]
        if name not in queries:
            raise UserError(
                f"{file}: there is no query {name}; with several queries, name each file of hits by its query "
                f"({next(iter(queries))}.hhr)"
            )
        hits.setdefault(name, []).extend(read_hits(file, queries[name]))
    return hits
