"""What `predict` folds: proteins and complexes, read from the user's files, with their alignments and templates."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from warpfold.data.example.assembly import Assembly
from warpfold.data.example.complexes import Complex, assemble, search_names
from warpfold.data.example.query_files import Given, read_query_files
from warpfold.data.example.raw_example import RawExample, Templates, from_sequence
from warpfold.data.example.templates import TemplateOutcome
from warpfold.data.formats.alignment import Alignment, merge
from warpfold.data.formats.chain_alignments import ChainAlignments, as_row, read_chain_alignments
from warpfold.errors import UserError
from warpfold.files import file_name
from warpfold.geometry.residue import GAP
from warpfold.prediction.params import Params, check_templates
from warpfold.prediction.templates import (
    Found,
    TemplateQuery,
    TemplateSources,
    check_fit,
    files_of_chains,
    find_templates_of,
    template_warnings,
)


@dataclass(frozen=True)
class FoldQuery:
    """What to fold: a name that is unique and safe in a path, a sequence, an alignment of it, templates.

    outcomes: of each template that was offered.  warnings: what is to be said of the input.
    """

    name: str
    sequence: str
    alignment: Alignment
    templates: Templates | None = None
    outcomes: Sequence[TemplateOutcome] = ()
    warnings: Sequence[str] = ()

    @property
    def residues(self) -> int:
        return len(self.sequence)

    @property
    def rows(self) -> int:
        """Return the rows of the alignment."""
        return len(self.alignment)

    def example(self) -> RawExample:
        """Encode it; with a deep alignment this takes a while."""
        return replace(from_sequence(self.sequence, [self.alignment], self.name), templates=self.templates)

    def parts(self) -> Iterator[bytes]:
        """Yield all that decides what is predicted."""
        yield f"{self.name}\n{self.sequence}\n".encode()
        yield from (self.alignment.rows.tobytes(), self.alignment.deletions.tobytes())
        yield from _template_parts(self.templates)


@dataclass(frozen=True)
class ComplexQuery:
    """A complex to fold, with the alignments and templates of its chains; the rest as in `FoldQuery`."""

    assembly: Assembly
    outcomes: Sequence[TemplateOutcome] = ()
    warnings: Sequence[str] = ()

    @property
    def name(self) -> str:
        return self.assembly.name

    @property
    def residues(self) -> int:
        return self.assembly.length

    @property
    def rows(self) -> int:
        """Return the rows of the alignments of the chains, copies counted once."""
        return sum({chain.sequence: chain.depth for chain in self.chains}.values())

    def example(self) -> Assembly:
        """Return the chains, encoded as they are."""
        return self.assembly

    @property
    def chains(self) -> tuple[RawExample, ...]:
        """Return the chains, which are in memory."""
        return tuple(chain for chain in self.assembly.chains if isinstance(chain, RawExample))

    def parts(self) -> Iterator[bytes]:
        """Yield all that decides what is predicted."""
        yield f"{self.name}\n{','.join(self.assembly.ids)}\n".encode()
        for chain in self.chains:
            yield from (array.tobytes() for array in (chain.aatype, chain.msa, chain.deletions))
            if (pairing := chain.pairing) is not None:
                for array in (pairing.species, pairing.identity, pairing.digest, pairing.unpaired):
                    yield np.ascontiguousarray(array).tobytes()
            yield from _template_parts(chain.templates)


Query = FoldQuery | ComplexQuery


def _template_parts(templates: Templates | None) -> Iterator[bytes]:
    if templates is not None:
        yield from (array.tobytes() for array in (templates.aatype, templates.positions, templates.mask))


# Returns files of alignments for queries, each with those of its sequences that have none.
FetchAlignments = Callable[[Sequence[tuple[Complex, list[str]]]], list[Path]]


@dataclass(frozen=True)
class ReadQueries:
    """What is to be folded, and what is to be said of all that was given."""

    found: dict[str, Query | UserError]  # by name, in their order: what to fold, or why it cannot be
    warnings: list[str]
    hits: list[str]  # files of template hits in the folders of queries

    @property
    def queries(self) -> list[Query]:
        return [one for one in self.found.values() if not isinstance(one, UserError)]

    @property
    def errors(self) -> dict[str, UserError]:
        return {name: one for name, one in self.found.items() if isinstance(one, UserError)}


def read_queries(given: Given | Sequence[Given], msas: Sequence[Path], together: bool = False) -> list[Query]:
    """Return the proteins and complexes that `read_given` reads.  Errors: UserError for a bad one, too."""
    read = read_given(given, msas, together)
    for error in read.errors.values():
        raise error
    return read.queries


def read_given(
    given: Given | Sequence[Given],
    msas: Sequence[Path],
    together: bool = False,
    fetch: FetchAlignments | None = None,
    check: Callable[[Complex], None] = lambda query: None,
) -> ReadQueries:
    """Read proteins and complexes (`read_query_files`), with their alignments from `msas`.

    Each alignment belongs to the sequence in its first row, and if there is one sequence, every one must be of it; the
    official order in which they are stacked is kept (`read_chain_alignments`).  together: the records of a FASTA file
    are the chains of one complex.  fetch: gets alignments for those of which a sequence has none.  check: raises
    UserError for one that the caller cannot fold.
    Errors: UserError for a file that cannot be read, two records of one name, an alignment that belongs to none.
    """
    files = read_query_files(given, together)
    read = [query for _, query in files.found]
    found: dict[str, Query | UserError] = {}
    for one in read:
        try:
            if one.error:
                raise UserError(one.error)
            check(one)
            for sequence in one.sequences:
                Alignment.of_query(sequence, one.name)  # an error for nucleic acid, before anything is fetched
        except UserError as error:
            found[one.name] = error
    sequences = [sequence for one in read for sequence in one.sequences]
    source = str(given) if isinstance(given, Given) else ", ".join(map(str, given))
    alignments = read_chain_alignments(msas, sequences, source, are_all=not any(one.error for one in read))
    if fetch is not None:
        lacking = [(one, lacking_of(one, alignments)) for one in read if one.name not in found]
        asked = [(one, without) for one, without in lacking if without]
        fetched = fetch(asked) if asked else []
        alignments = alignments.joined(read_chain_alignments(fetched, sequences, source))
    for one in read:
        if one.name not in found:
            try:
                found[one.name] = _with_alignments(one, alignments)
            except UserError as error:
                found[one.name] = error
    warnings = [*alignments.notes, *of_none(alignments.unused)]
    if files.predicted:
        warnings.append(f"structures that were predicted are not folded anew: {_some(files.predicted)}")
    return ReadQueries({one.name: found[one.name] for one in read}, warnings, files.hits)


def _with_alignments(given: Complex, alignments: ChainAlignments) -> Query:
    """Return a protein or a complex with its alignments.  Errors: UserError for what is no protein."""
    if len(given.ids) > 1:
        assembly, notes = assemble(given, alignments)
        return ComplexQuery(assembly, warnings=notes)
    (sequence,) = given.sequences
    own = [*given.alignments, *alignments.of(sequence)]
    alone = single_query(given.name, sequence, own)
    bare = [] if own else ["no alignment: folded by the sequence alone"]
    return replace(alone, warnings=[*given.notes, *bare, *alone.warnings])


def lacking_of(query: Complex, alignments: ChainAlignments | None) -> list[str]:
    """Return the sequences of a query that have no alignment."""
    own = {alignment.query for alignment in query.alignments}
    return [one for one in query.sequences if as_row(one) not in own and not (alignments and alignments.of(one))]


def single_query(name: str, sequence: str, given: Sequence[Alignment]) -> FoldQuery:
    """Return a single protein with those of its alignments that it uses, and warnings about rows that it lacks.

    As official, the rows of `uniprot_hits` are in no alignment of one chain; but they are more than nothing.
    """
    if not given:
        return FoldQuery(name, sequence, Alignment.of_query(sequence, name))
    rows = merge([one for one in given if one.stands_alone] or given)
    warnings = []
    if unused := sum(len(one) - 1 for one in given) - (len(rows) - 1):
        rows_of = "1 row" if unused == 1 else f"{unused} rows"
        warnings.append(
            f"{rows_of} of alignments that are named as serving to pair (uniprot, pair) not used for a single protein "
            "that has others; rename the files to use all"
        )
    if not ((rows.rows != rows.rows[0]).any(1) & (rows.rows != GAP).any(1)).any():
        warnings.append("its alignment has one row, its own: folded by the sequence alone")
    return FoldQuery(name, sequence, rows, warnings=warnings)


def of_none(files: Sequence[str]) -> list[str]:
    """Return a sentence about alignments that belong to none of the sequences, if there are any."""
    if not files:
        return []
    count = "1 alignment" if len(files) == 1 else f"{len(files)} alignments"
    return [f"{count} of none of the sequences, left out: {_some(files)}"]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def with_templates(
    queries: Sequence[Query], sources: TemplateSources, models: Sequence[Params], refused: Collection[str] = ()
) -> list[Query]:
    """Return the queries with templates, as many as the models take; models without template parts ignore them.

    refused: names of records that cannot be folded, whose files of hits are not read.
    Errors: UserError as in `find_templates`, for a file that fits no chain of the complexes, and if no model takes
    templates, or one fewer than the user's files.
    """
    able = [model for model in models if model.config.templates.enabled] or models
    asked = [_ask(query, sources.files, alone=len(queries) == 1 and not refused) for query in queries]
    each = [one for some in asked for one in some]
    for model in able:
        check_templates(model.config, model.sample, max(1, *(len(one.files) for one in each)))
    check_fit(list(map(str, sources.files)), [one.files for one in each], (each[0].chains or each[0].names)[0])
    most = max(model.sample.max_templates for model in able)
    found = dict(zip(each, find_templates_of(each, sources, most, refused)))
    with_found = [_with_found(query, {one: found[one] for one in own}) for query, own in zip(queries, asked)]
    return [replace(one, warnings=[*one.warnings, *template_warnings(one.outcomes, sources)]) for one in with_found]


def _ask(query: Query, files: Sequence[str], alone: bool) -> list[TemplateQuery]:
    """Return the sequences of a query for which templates are sought.  alone: it is the only query."""
    if isinstance(query, FoldQuery):
        return [TemplateQuery(query.sequence, (query.name,), tuple(map(str, files)))]
    chains = dict(zip(query.assembly.ids, (chain.sequence for chain in query.chains)))
    own = files_of_chains(files, chains)
    asked = []
    for sequence, searched in search_names(query.name, chains).items():
        ids = tuple(id for id, other in chains.items() if other == sequence)
        alike = (*ids, *map(file_name, ids)) if alone else ()
        names = (*alike, *(f"{query.name}_{id}" for id in ids), searched)
        asked.append(TemplateQuery(sequence, names, tuple(own[sequence]), ids))
    return asked


def _with_found(query: Query, found: Mapping[TemplateQuery, Found]) -> Query:
    if isinstance(query, FoldQuery):
        ((templates, outcomes),) = found.values()
        return replace(query, templates=templates, outcomes=outcomes)
    by_sequence = {one.sequence: templates for one, (templates, _) in found.items()}
    chains = tuple(replace(chain, templates=by_sequence[chain.sequence]) for chain in query.chains)
    outcomes = [replace(outcome, chains=one.chains) for one, (_, outcomes) in found.items() for outcome in outcomes]
    return replace(query, assembly=replace(query.assembly, chains=chains), outcomes=outcomes)
