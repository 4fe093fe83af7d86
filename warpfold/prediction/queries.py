"""Queries: chains with their alignments and templates, read from the user's files or passed from Python."""

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from warpfold import arguments
from warpfold.arguments import PathLike, WrongArgument, is_list, path_or_none, paths, shown
from warpfold.data.example.guess import SELF, GuessFiles, GuessLike, GuessStructure, as_guess
from warpfold.data.example.query_files import Complex, Given, assemble, chain_ids, read_query_files, search_names
from warpfold.data.example.raw_example import Assembly, RawExample, Templates, from_sequence
from warpfold.data.example.templates import TemplateOutcome
from warpfold.data.formats.alignment import Alignment, as_row, encode, parse_a3m
from warpfold.data.formats.input_files import ChainAlignments, read_chain_alignments
from warpfold.errors import StorageError, UserError
from warpfold.files import file_name
from warpfold.prediction.notices import Notice, noted, shorten_list
from warpfold.prediction.params import Params, check_templates
from warpfold.prediction.templates import (
    TemplateQuery,
    TemplateSources,
    check_fit,
    files_of_chains,
    find_templates,
    template_notices,
)
from warpfold.progress import Progress, no_progress

if TYPE_CHECKING:
    from warpfold.data.search.server import AlignmentServer

Sequences = str | Sequence[str] | Mapping[str, str]  # of a protein, or of the chains of a complex
Rows = Alignment | Sequence[str]  # of one sequence, as in A3M
ChainAlignment = Rows | PathLike | Sequence[PathLike] | None
TemplatesLike = Templates | PathLike | Sequence[PathLike] | None
Alignments = ChainAlignment | Sequence[ChainAlignment] | Mapping[str, ChainAlignment]


@dataclass(frozen=True)
class Query:
    """K chains, each with its alignment and templates; a single protein is a complex of one chain.

    name: unique, and safe in a path.  outcomes: one for each template that was offered.  notices: about the input.
    structure: the structure file that the query was read from, if any.  guess: the structure from which the first pass
    starts.  fixed: the chains that are their own templates in the guess; in a design, its target.
    """

    name: str
    ids: tuple[str, ...]  # [K]
    sequences: tuple[str, ...]  # [K], the user's letters; those of `chains` have X for U
    chains: tuple[RawExample, ...]  # [K], copies share an example
    outcomes: Sequence[TemplateOutcome] = ()
    notices: Sequence[Notice] = ()
    structure: GuessStructure | None = None
    guess: GuessStructure | None = None
    fixed: tuple[str, ...] = ()

    @property
    def assembly(self) -> Assembly:
        return Assembly(self.name, self.ids, self.chains)

    @property
    def is_complex(self) -> bool:
        return len(self.ids) > 1

    @property
    def designed(self) -> GuessStructure | None:
        """Return the structure that predictions are compared with, which has the same chains and lengths."""
        return self.structure if self.guess is None else self.guess

    @property
    def residues(self) -> int:
        return sum(map(len, self.sequences))

    @property
    def rows(self) -> int:
        """Count the alignment rows of all chains; copies count once."""
        return sum({chain.sequence: chain.depth for chain in self.chains}.values())

    @property
    def templates(self) -> int:
        """Return the largest number of templates of a chain."""
        return max(chain.templates_count + (id in self.fixed) for id, chain in zip(self.ids, self.chains))

    def parts(self) -> Iterator[bytes]:
        """Yield the bytes of everything that decides the prediction, for a digest."""
        yield f"{self.name}\n{','.join(self.ids)}\n".encode()
        for chain in self.chains:
            yield from (array.tobytes() for array in (chain.aatype, chain.msa, chain.deletions))
            if (pairing := chain.pairing) is not None:
                for array in (pairing.species, pairing.identity, pairing.digest, pairing.unpaired):
                    yield np.ascontiguousarray(array).tobytes()
            if chain.templates is not None:
                templates = chain.templates.aatype, chain.templates.positions, chain.templates.mask
                yield from (array.tobytes() for array in templates)
        if self.guess is not None:
            yield f"{self.guess.digest}\n{','.join(self.fixed)}\n".encode()


# Returns files of alignments for queries, each with its sequences that have no alignment.
FetchAlignments = Callable[[Sequence[tuple[Complex, list[str]]]], list[Path]]


@dataclass(frozen=True)
class ReadQueries:
    """Queries as read from files, and notices about the files."""

    found: dict[str, Query | UserError]  # by name, in order: the query, or the reason why it cannot be folded
    notices: list[Notice]
    hits: list[str]  # files of template hits in the folders of queries

    @property
    def queries(self) -> list[Query]:
        return [query for query in self.found.values() if not isinstance(query, UserError)]

    @property
    def errors(self) -> dict[str, UserError]:
        return {name: error for name, error in self.found.items() if isinstance(error, UserError)}

    def hoist_common_notices(self) -> "ReadQueries":
        """Move the notices that all of several queries share to the run, such as designs without alignments."""
        queries = self.queries
        if len(queries) < 2:
            return self
        common = [notice for notice in queries[0].notices if all(notice in query.notices for query in queries)]
        results = dict(self.found)
        for query in queries:
            notices = [notice for notice in query.notices if notice not in common]
            results[query.name] = replace(query, notices=notices)
        return replace(self, found=results, notices=[*self.notices, *common])


def read_queries(given: Given | Sequence[Given], msas: Sequence[Path], together: bool = False) -> list[Query]:
    """Read proteins and complexes as `read_given` does.  Errors: UserError for a bad record too."""
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
    fixed: Sequence[str] = (),
    pairs: bool = False,
) -> ReadQueries:
    """Read proteins and complexes (`read_query_files`), with their alignments from `msas`.

    Each alignment belongs to the sequence in its first row.  If there is one sequence, all alignments must belong to
    it.  Alignments are stacked in the official order (`read_chain_alignments`).  together: the records of a FASTA file
    are the chains of one complex.  fetch: gets alignments for sequences that have none; if chains are `fixed`, only for
    these, as the others are designed.  check: raises UserError for a query that the caller cannot fold.  pairs: each
    record is a chain of complexes to be made.
    Errors: UserError for a file that cannot be read, two records of one name, and an alignment of no sequence.
    """
    files = read_query_files(given, together)
    records = files.found
    results: dict[str, Query | UserError] = {}
    for record in records:
        try:
            if record.error:
                raise UserError(record.error)
            check(record)
            for sequence in record.sequences:
                # Raises for nucleic acids, before anything is fetched.
                Alignment.of_query(sequence, record.name)
        except UserError as error:
            results[record.name] = error
    sequences = [sequence for record in records for sequence in record.sequences]
    source = str(given) if isinstance(given, Given) else ", ".join(map(str, given))
    alignments = read_chain_alignments(msas, sequences, source, are_all=not any(record.error for record in records))
    if fetch is not None:
        lacking = [(record, lacking_of(record, alignments, fixed)) for record in records if record.name not in results]
        to_fetch = [(record, missing) for record, missing in lacking if missing]
        fetched = fetch(to_fetch) if to_fetch else []
        alignments = alignments.joined(read_chain_alignments(fetched, sequences, source))
    examples: dict[str, RawExample] = {}
    for record in records:
        if record.name not in results:
            try:
                # The chain of a single protein is A, whatever its file calls it.
                query_record = replace(record, ids=("A",)) if len(record.ids) == 1 else record
                make = chain_of_pairs if pairs else make_query
                results[record.name] = make(query_record, alignments, examples)
            except UserError as error:
                results[record.name] = error
    notices = unused_msa_notices(alignments)
    if files.predicted:
        notices += noted([f"predicted structures are not folded again: {shorten_list(files.predicted)}"])
    return ReadQueries({record.name: results[record.name] for record in records}, notices, files.hits)


def make_query(
    given: Complex, alignments: ChainAlignments | None = None, made: dict[str, RawExample] | None = None
) -> Query:
    """Make a query of chains with their alignments, and notices about missing and unused rows.

    made: as in `assemble`.  The alignment of a single protein excludes the rows of `uniprot_hits`, as officially,
    unless there are no others.
    Errors: UserError for an alignment of another protein, or a sequence that is not a protein's.
    """
    if len(given.ids) > 1:
        assembly, notes = assemble(given, alignments, made)
        chains = tuple(chain for chain in assembly.chains if isinstance(chain, RawExample))
        return Query(given.name, given.ids, given.sequences, chains, notices=noted(notes), structure=given.structure)
    (sequence,), notices = given.sequences, noted(given.notes)
    all_alignments = [*given.alignments, *(alignments.of(sequence) if alignments else ())]
    used_alignments = [alignment for alignment in all_alignments if alignment.stands_alone] or all_alignments
    example = from_sequence(sequence, used_alignments or [Alignment.of_query(sequence, given.name)], given.name)
    if unused := sum(len(alignment) - 1 for alignment in all_alignments) - sum(
        len(alignment) - 1 for alignment in used_alignments
    ):
        notices.append(Notice("pairing_rows", {"rows": unused}))
    if not all_alignments or example.depth == 1:
        notices.append(Notice("one_row" if all_alignments else "no_alignment"))
    structure = None if given.structure is None else replace(given.structure, names=given.ids)
    return Query(given.name, given.ids, given.sequences, (example,), notices=notices, structure=structure)


def chain_of_pairs(
    given: Complex, alignments: ChainAlignments | None = None, made: dict[str, RawExample] | None = None
) -> Query:
    """Make a query of a single chain as `make_query` does, with the data by which its rows are paired.

    Errors: UserError as in `make_query`, and for a complex.
    """
    if len(given.ids) > 1:
        raise UserError(f"{given.name}: is a complex, and --pairs pairs single chains. Pass each chain as a record.")
    assembly, _ = assemble(replace(given, ids=("A",)), alignments, made)
    (chain,) = assembly.chains
    assert isinstance(chain, RawExample)
    notices = [*noted(given.notes), *([Notice("no_alignment")] if chain.depth == 1 else [])]
    return Query(given.name, given.ids, given.sequences, (chain,), notices=notices)


def pair_names(names: Sequence[str]) -> dict[tuple[int, int], str]:
    """Name each pair of chains, and of each chain with itself: ONE_and_OTHER, or by their numbers."""
    pairs: dict[tuple[int, int], str] = {}
    taken_names: set[str] = set()
    for i, j in combinations_with_replacement(range(len(names)), 2):
        name = f"{names[i]}_and_{names[j]}"
        # The name may be too long for a file, or ambiguous: a_and_b with c, a with b_and_c.
        if name != file_name(name) or name.lower() in taken_names:
            name = f"pair_{i + 1}_and_{j + 1}"
        pairs[i, j] = name
        taken_names.add(name.lower())
    return pairs


def all_pairs(chains: Sequence[Query]) -> list[Query]:
    """Make a complex of every pair of chains, and of each chain with itself; the complexes share the chains' examples.

    Notices about the input stay with the chains.
    """
    pairs = []
    for (i, j), name in pair_names([chain.name for chain in chains]).items():
        first, second = chains[i], chains[j]
        examples, sequences = (*first.chains, *second.chains), (*first.sequences, *second.sequences)
        outcomes = [*first.outcomes, *(second.outcomes if i != j else ())]
        pairs.append(Query(name, ("A", "B"), sequences, examples, outcomes))
    return pairs


def lacking_of(query: Complex, alignments: ChainAlignments | None, fixed: Sequence[str] = ()) -> list[str]:
    """Return the sequences of a query, or of its fixed chains if there are any, that have no alignment."""
    aligned = {alignment.query for alignment in query.alignments}
    needed_sequences = [sequence for id, sequence in zip(query.ids, query.sequences) if id in fixed or not fixed]
    return [
        sequence
        for sequence in needed_sequences
        if as_row(sequence) not in aligned and not (alignments and alignments.of(sequence))
    ]


def unused_msa_notices(alignments: ChainAlignments) -> list[Notice]:
    """Return warnings about files of alignments: notes, and files that belong to none of the sequences."""
    notices, unused = noted(alignments.notes), alignments.unused
    if unused:
        notices.append(Notice("unused_alignments", {"count": len(unused), "detail": shorten_list(unused)}))
    return notices


def with_templates(
    queries: Sequence[Query], sources: TemplateSources, models: Sequence[Params], refused: Collection[str] = ()
) -> list[Query]:
    """Add templates to queries, as many as the models take; models without a template stack ignore them.

    refused: names of records that cannot be folded; their files of hits are not read.
    Errors: UserError as in `find_templates`, for a file that fits no chain of the complexes, if no model takes
    templates, and if a model takes fewer than the user's files.
    """
    template_models = [model for model in models if model.config.templates.enabled] or models
    template_queries = [_template_queries(query, sources.files, len(queries) == 1 and not refused) for query in queries]
    all_template_queries = [template_query for chain_queries in template_queries for template_query in chain_queries]
    for model in template_models:
        check_templates(
            model.config, model.sample, max(1, *(len(template_query.files) for template_query in all_template_queries))
        )
    check_fit(
        list(map(str, sources.files)),
        [template_query.files for template_query in all_template_queries],
        (all_template_queries[0].chains or all_template_queries[0].names)[0],
    )
    max_templates = max(model.sample.max_templates for model in template_models)
    templates_by_query = dict(
        zip(all_template_queries, find_templates(all_template_queries, sources, max_templates, refused))
    )
    completed = []
    for query, chain_queries in zip(queries, template_queries):
        by_sequence = {chain_query.sequence: templates_by_query[chain_query][0] for chain_query in chain_queries}
        chains = tuple(
            replace(chain, templates=by_sequence[sequence]) for chain, sequence in zip(query.chains, query.sequences)
        )
        outcomes = [
            replace(outcome, chains=chain_query.chains)
            for chain_query in chain_queries
            for outcome in templates_by_query[chain_query][1]
        ]
        notices = [*query.notices, *template_notices(outcomes, sources)]
        completed.append(replace(query, chains=chains, outcomes=outcomes, notices=notices))
    return completed


def _template_queries(query: Query, files: Sequence[str], is_only: bool) -> list[TemplateQuery]:
    """Return the sequences of a query for which templates are sought.  is_only: there is no other query."""
    if not query.is_complex:
        return [TemplateQuery(query.sequences[0], (query.name,), tuple(map(str, files)))]
    chains = dict(zip(query.ids, query.sequences))
    by_sequence = files_of_chains(files, chains)
    template_queries = []
    for sequence, search_name in search_names(query.name, chains).items():
        ids = tuple(id for id, other in chains.items() if other == sequence)
        # In the only query, a file may be named after a chain alone.
        chain_names = (*ids, *map(file_name, ids)) if is_only else ()
        names = (*chain_names, *(f"{query.name}_{id}" for id in ids), search_name)
        template_queries.append(TemplateQuery(sequence, names, tuple(by_sequence[sequence]), ids))
    return template_queries


def check_guess(given: Any, fixed: Sequence[str], models: Sequence[Params]) -> None:
    """Raise UserError for fixed chains without an initial guess, or with models that take no templates."""
    if fixed and given is None:
        raise UserError("--fixed-chains needs --initial-guess, the structure that the chains are to keep")
    if fixed and not any(model.config.templates.enabled for model in models):
        check_templates(models[0].config, models[0].sample, 1)


def with_guess(query: Query, given: GuessLike, fixed: Sequence[str] = ()) -> Query:
    """Add an initial guess to a query, with notices about missing and different residues.

    given: SELF for the query's own structure.
    Errors: UserError for a structure of other chains (`as_guess`), and for fixed chains that the query lacks.
    """
    if given is None:
        return query
    if isinstance(given, str) and given == SELF:
        if query.structure is None:
            raise UserError(f"{query.name}: is no structure that it could start from. Name a file or a folder instead.")
        given = query.structure
    sequences, notices = dict(zip(query.ids, query.sequences)), []
    if unknown := [id for id in fixed if id not in sequences]:
        raise UserError(f"{query.name}: has no chain {unknown[0]} to be fixed. Choose from {', '.join(query.ids)}.")
    guess = as_guess(given, query.name, sequences)
    guess_sequences = dict(zip(guess.names, guess.sequences))
    differences = [
        f"{id} {number}"
        for id in fixed
        for number, (a, b) in enumerate(zip(guess_sequences[id], sequences[id]), 1)
        if a != b
    ]
    for kind, residues in (("guess_gaps", guess.without_beta(sequences)), ("fixed_differs", differences)):
        if residues:
            notices.append(Notice(kind, {"count": len(residues), "detail": shorten_list(residues)}))
    return replace(query, guess=guess, fixed=tuple(fixed), notices=[*query.notices, *notices])


def with_guesses(
    found: Mapping[str, Query | UserError], given: Any, fixed: Sequence[str]
) -> dict[str, Query | UserError]:
    """Add initial guesses to queries; a query without a valid one becomes the error.  given: as `--initial-guess`.

    Errors: UserError for a folder without structures.
    """
    files = None if given is None or given == SELF else GuessFiles(arguments.path("initial_guess", given))
    guessed_queries: dict[str, Query | UserError] = {}
    for name, query in found.items():
        try:
            guess = given if files is None or isinstance(query, UserError) else files.of(name)
            guessed_queries[name] = query if isinstance(query, UserError) else with_guess(query, guess, fixed)
        except UserError as error:
            guessed_queries[name] = error
    return guessed_queries


def query_of(
    sequence: Sequences,
    alignment: Alignments,
    name: str,
    fetch: FetchAlignments | None = None,
    fixed: Sequence[str] = (),
) -> Query:
    """Make a query from Python arguments: a protein or a complex, with its alignments.

    sequence: one letter per residue; for a complex A:B, a list, or chain -> sequence.  alignment: rows, an `Alignment`,
    or files; for a complex a list with one for each chain, chain -> alignment, or files, each of which belongs to the
    chain in its first row.  fetch: gets alignments of sequences that have none.  fixed: as in `read_given`.
    Errors: WrongArgument for other types; UserError for letters that are not residues, files that cannot be read, and
    rows that do not fit.
    """
    chains = _chains(sequence, name)
    for id, letters in chains.items():
        encode(letters, name if len(chains) == 1 else f"{name} {id}")  # checks the letters
    is_protein = isinstance(sequence, str) and len(chains) == 1
    files, notices, aligned = None, list[Notice](), list[Alignment]()
    if is_protein:
        aligned = _alignments_of_chain(chains["A"], alignment, name, notices)
    elif _is_path(alignment) or _is_paths(alignment):
        files = read_chain_alignments(paths("alignment", alignment), chains.values(), name)
        notices = unused_msa_notices(files)
    else:
        aligned = _alignments_of_chains(chains, alignment, name, notices)
    record = Complex(name, tuple(chains), tuple(chains.values()), tuple(aligned))
    if fetch is not None and (lacking := lacking_of(record, files, fixed)):
        fetched = read_chain_alignments(fetch([(record, lacking)]), chains.values(), name)
        files = fetched if files is None else files.joined(fetched)
    query = make_query(record, files)
    # A caller who passed no alignments needs no notice that there are none.
    return replace(query, notices=[*notices, *query.notices] if aligned or files else notices)


def _chains(sequence: Any, name: str) -> dict[str, str]:
    """Return the letters of each chain by name; a protein passed as text is chain A."""
    if isinstance(sequence, str):
        if not sequence.strip():
            raise UserError(f"{name}: the sequence has no residues. Pass a letter for each.")
        if not set(sequence).isdisjoint("./"):
            raise UserError(f"{name}: sequence = {shown(sequence)}: is no sequence. Fold a file with fold_many.")
        sequence = sequence.split(":")
    if not isinstance(sequence, Mapping) and not is_list(sequence):
        problem = "a text is needed, or those of the chains of a complex. Fold files with fold_many."
        raise WrongArgument(f"sequence = {shown(sequence)}: {problem}")
    if not sequence:
        raise UserError(f"{name}: sequence = {shown(sequence)}: has no chains. Pass at least one.")
    letters_by_id = sequence if isinstance(sequence, Mapping) else dict(zip(chain_ids(len(sequence)), sequence))
    for id, letters in letters_by_id.items():
        if not isinstance(letters, str) or not isinstance(id, str):
            raise WrongArgument(f"{name}: chain {id} = {shown(letters)}: a text is needed")
    return {id: letters.upper() for id, letters in letters_by_id.items()}


def _alignments_of_chains(chains: Mapping[str, str], given: Any, name: str, notices: list[Notice]) -> list[Alignment]:
    """Read the alignments of a complex, given chain by chain.  notices: the list for notices about their files."""
    if given is not None and not isinstance(given, Mapping) and not is_list(given):
        raise WrongArgument(f"alignment = {shown(given)}: files, a list or a mapping of chains is needed")
    given = () if given is None else given
    alignments_by_id = given if isinstance(given, Mapping) else dict(zip(chains, given))
    if unknown := [id for id in alignments_by_id if id not in chains]:
        raise UserError(f"{name}: an alignment for chain {unknown[0]}, but the chains are {', '.join(chains)}")
    if not chains or len(alignments_by_id) < len(given):
        raise UserError(f"{name}: {len(chains)} chains and {len(given)} alignments. Pass one for each, or none.")
    return [
        alignment
        for id, rows in alignments_by_id.items()
        for alignment in _alignments_of_chain(chains[id], rows, f"{name} {id}", notices)
    ]


def _alignments_of_chain(sequence: str, given: Any, name: str, notices: list[Notice]) -> list[Alignment]:
    """Read the alignments of one sequence; rows as in A3M become one alignment, with or without the sequence itself."""
    if given is None:
        return []
    if isinstance(given, Alignment):
        return [given.check_query(sequence, name)]
    # A list of texts is a list of rows.
    if _is_path(given) or (_is_paths(given) and not any(isinstance(row, str) for row in given)):
        chain_alignments = read_chain_alignments(paths("alignment", given), [sequence], name)
        notices += unused_msa_notices(chain_alignments)
        return chain_alignments.of(sequence)
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
    """Add templates for a model to a query, with the outcome of each that was offered.

    templates: files, FILE or FILE:CHAIN (in a complex also ID=FILE), or `Templates` for a single sequence.  hits,
    structures, max_date: as in `TemplateSources`.
    Errors: UserError as in `with_templates`.
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
        max_date=max_date,
    )
    if not sources:
        return query
    (completed,) = with_templates([query], sources, [model])
    return replace(completed, notices=[*sources.notices, *completed.notices])


def fetching(
    server: "AlignmentServer", check: Callable[[Complex], None], tell: Progress = no_progress
) -> FetchAlignments:
    """Return a function that fetches missing alignments from a server.  check: called with each query before.

    Errors: UserError as in `data.search.fetch.fetch_alignments`.
    """

    def fetch(lacking: Sequence[tuple[Complex, list[str]]]) -> list[Path]:
        from warpfold.data.search.fetch import fetch_alignments, make_request

        for query, _ in lacking:
            check(query)
        return fetch_alignments(server, [make_request(query, sequences) for query, sequences in lacking], tell)

    return fetch


def each_given(
    sequences: Any,
    alignments: Any,
    templates: Any,
    together: bool,
    fetch: FetchAlignments | None,
    check: Callable[[Complex], None],
    complete: Callable[[Query, TemplatesLike], Query],
    guesses: Any = None,
    fixed: Sequence[str] = (),
) -> dict[str, Query | UserError]:
    """Read many queries with their templates, by name and in order; a query that cannot be folded becomes the error.

    together, fetch, check: as in `read_given`.  complete: adds templates to a query.  guesses: as in `with_guesses`; or
    a list, or by name.
    Errors: WrongArgument; ServerGone and StorageError, since other queries would fail in the same way.
    """
    from warpfold.data.search.server import ServerGone

    results: dict[str, Query | UserError] = {}
    sequences_by_name: Mapping[str, Any] = {}
    if (files := _files_of(sequences)) is not None:
        read = read_given(files, paths("alignments", alignments), together, fetch, check, fixed)
        for notice in read.notices:
            logging.getLogger("warpfold").warning("%s", notice.text)
        results, aligned = dict(read.found), {}
    else:
        if not isinstance(sequences, Mapping) and not is_list(sequences):
            raise WrongArgument(f"sequences = {shown(sequences)}: a list, name -> sequence, or a file is needed")
        numbered = not isinstance(sequences, Mapping)
        sequences_by_name = (
            {f"query_{number}": sequence for number, sequence in enumerate(sequences, 1)} if numbered else sequences
        )
        if wrong_names := [name for name in sequences_by_name if not isinstance(name, str) or not name]:
            raise WrongArgument(f"sequences: the name {shown(wrong_names[0])}: a text is needed")
        aligned = _each("alignments", alignments, list(sequences_by_name))
    templates_by_name = _each("templates", templates, [*(results or sequences_by_name)])
    by_name = isinstance(guesses, Mapping) or is_list(guesses)
    guesses_by_name = _each("initial_guess", guesses if by_name else None, [*templates_by_name])
    for name in templates_by_name:
        try:
            query = (
                results[name]
                if name in results
                else query_of(sequences_by_name[name], aligned[name], name, fetch, fixed)
            )
            if not isinstance(query, UserError):
                query = with_guess(complete(query, templates_by_name[name]), guesses_by_name[name], fixed)
            results[name] = query
        except (WrongArgument, ServerGone, StorageError):
            raise
        except UserError as error:
            results[name] = error
    return results if guesses is None or by_name else with_guesses(results, guesses, fixed)


def _files_of(sequences: Any) -> list[Given] | None:
    """Return the files, folders and texts to read as `warpfold predict` does; None for sequences.

    In a list that contains a file, every text is the name of a file or a sequence.
    """
    if isinstance(sequences, str | os.PathLike):
        if isinstance(sequences, str) and sequences != "-" and not Path(sequences).exists():
            raise WrongArgument(f"sequences = {shown(sequences)}: no such file. Pass a list for sequences: [...].")
        return [sequences if sequences == "-" else Path(sequences)]
    if is_list(sequences) and any(map(_is_file, sequences)):
        return [Path(item) if _is_file(item) else item for item in arguments.queries("sequences", sequences)]
    return None


def _is_file(one: Any) -> bool:
    """Return whether this is the name of a file.  A sequence has neither "." nor "/"."""
    return isinstance(one, os.PathLike) or (isinstance(one, str) and not set(one).isdisjoint("./"))


def _each(what: str, given: Any, names: Sequence[str]) -> dict[str, Any]:
    """Match values with names: by name, or in the order of the names; without values, None for every name."""
    if given is None or (is_list(given) and not given):
        return dict.fromkeys(names)
    if isinstance(given, Mapping):
        if unknown := [name for name in given if name not in names]:
            raise WrongArgument(f"{what}: there is no {unknown[0]} among the sequences")
        return {name: given.get(name) for name in names}
    if not is_list(given):
        raise WrongArgument(f"{what} = {shown(given)}: a list is needed, one for each sequence, or name -> ... of some")
    if (count := len(given)) != len(names):
        raise WrongArgument(f"{what}: {count} for {len(names)} sequences. Pass one for each, or name -> ... of some.")
    return dict(zip(names, given))
