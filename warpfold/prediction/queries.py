"""What is folded: chains with their alignments and templates, read from the user's files or given from Python."""

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
Rows = Alignment | Sequence[str]  # of one sequence, as A3M has them
OfChain = Rows | PathLike | Sequence[PathLike] | None
TemplatesLike = Templates | PathLike | Sequence[PathLike] | None
Alignments = OfChain | Sequence[OfChain] | Mapping[str, OfChain]


@dataclass(frozen=True)
class Query:
    """What to fold: K chains, each with its alignment and templates; a single protein is a complex of one chain.

    name: unique, and safe in a path.  outcomes: of each template that was offered.  notices: about the input.
    structure: its own, where it was read from one.  guess: where the first pass starts.  fixed: the chains that are
    their own templates in it, and the target of a design.
    """

    name: str
    ids: tuple[str, ...]  # [K]
    sequences: tuple[str, ...]  # [K], as given: those of `chains` have X for U
    chains: tuple[RawExample, ...]  # [K], copies share theirs
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
        """Return the structure that a prediction is compared with, of the same chains and lengths."""
        return self.structure if self.guess is None else self.guess

    @property
    def residues(self) -> int:
        return sum(map(len, self.sequences))

    @property
    def rows(self) -> int:
        """Return the rows of the alignments of the chains, copies counted once."""
        return sum({chain.sequence: chain.depth for chain in self.chains}.values())

    @property
    def templates(self) -> int:
        """Return the templates of the chain that has most."""
        return max(chain.templates_count + (id in self.fixed) for id, chain in zip(self.ids, self.chains))

    def parts(self) -> Iterator[bytes]:
        """Yield all that decides what is predicted."""
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


# Returns files of alignments for queries, each with those of its sequences that have none.
FetchAlignments = Callable[[Sequence[tuple[Complex, list[str]]]], list[Path]]


@dataclass(frozen=True)
class ReadQueries:
    """What is to be folded, and what is to be said of all that was given."""

    found: dict[str, Query | UserError]  # by name, in their order: what to fold, or why it cannot be
    notices: list[Notice]
    hits: list[str]  # files of template hits in the folders of queries

    @property
    def queries(self) -> list[Query]:
        return [one for one in self.found.values() if not isinstance(one, UserError)]

    @property
    def errors(self) -> dict[str, UserError]:
        return {name: one for name, one in self.found.items() if isinstance(one, UserError)}

    def hoist_common_notices(self) -> "ReadQueries":
        """Say of the run what would be said of each of several queries, as of designs, which have no alignments."""
        queries = self.queries
        if len(queries) < 2:
            return self
        common = [one for one in queries[0].notices if all(one in query.notices for query in queries)]
        found = dict(self.found)
        for query in queries:
            found[query.name] = replace(query, notices=[one for one in query.notices if one not in common])
        return replace(self, found=found, notices=[*self.notices, *common])


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
    fixed: Sequence[str] = (),
    pairs: bool = False,
) -> ReadQueries:
    """Read proteins and complexes (`read_query_files`), with their alignments from `msas`.

    Each alignment belongs to the sequence in its first row, and if there is one sequence, every one must be of it; the
    official order in which they are stacked is kept (`read_chain_alignments`).  together: the records of a FASTA file
    are the chains of one complex.  fetch: gets alignments for those of which a sequence has none; where chains are
    `fixed`, of these alone, as the others are designed.  check: raises UserError for one that the caller cannot fold.
    pairs: each is a chain that will be part of complexes.
    Errors: UserError for a file that cannot be read, two records of one name, an alignment that belongs to none.
    """
    files = read_query_files(given, together)
    read = files.found
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
        lacking = [(one, lacking_of(one, alignments, fixed)) for one in read if one.name not in found]
        asked = [(one, without) for one, without in lacking if without]
        fetched = fetch(asked) if asked else []
        alignments = alignments.joined(read_chain_alignments(fetched, sequences, source))
    made: dict[str, RawExample] = {}
    for one in read:
        if one.name not in found:
            try:
                single = len(one.ids) == 1  # whatever its chain is called in a file
                make = chain_of_pairs if pairs else make_query
                found[one.name] = make(replace(one, ids=("A",)) if single else one, alignments, made)
            except UserError as error:
                found[one.name] = error
    notices = unused_msa_notices(alignments)
    if files.predicted:
        notices += noted([f"structures that were predicted are not folded anew: {shorten_list(files.predicted)}"])
    return ReadQueries({one.name: found[one.name] for one in read}, notices, files.hits)


def make_query(
    given: Complex, alignments: ChainAlignments | None = None, made: dict[str, RawExample] | None = None
) -> Query:
    """Return chains with their alignments, and notices of what these lack or are not used for.

    made: as of `assemble`.  As official, the rows of `uniprot_hits` are in no alignment of a protein alone; but they
    are more than nothing.
    Errors: UserError for an alignment of another protein, or a sequence that is no protein's.
    """
    if len(given.ids) > 1:
        assembly, notes = assemble(given, alignments, made)
        chains = tuple(chain for chain in assembly.chains if isinstance(chain, RawExample))
        return Query(given.name, given.ids, given.sequences, chains, notices=noted(notes), structure=given.structure)
    (sequence,), notices = given.sequences, noted(given.notes)
    own = [*given.alignments, *(alignments.of(sequence) if alignments else ())]
    used = [one for one in own if one.stands_alone] or own
    example = from_sequence(sequence, used or [Alignment.of_query(sequence, given.name)], given.name)
    if unused := sum(len(one) - 1 for one in own) - sum(len(one) - 1 for one in used):
        notices.append(Notice("pairing_rows", {"rows": unused}))
    if not own or example.depth == 1:
        notices.append(Notice("one_row" if own else "no_alignment"))
    structure = None if given.structure is None else replace(given.structure, names=given.ids)
    return Query(given.name, given.ids, given.sequences, (example,), notices=notices, structure=structure)


def chain_of_pairs(
    given: Complex, alignments: ChainAlignments | None = None, made: dict[str, RawExample] | None = None
) -> Query:
    """Return a single chain as `make_query`, but with what its rows are paired by.

    Errors: UserError as of `make_query`, and for a complex.
    """
    if len(given.ids) > 1:
        raise UserError(f"{given.name}: is a complex, and --pairs pairs single chains; give each chain as a record")
    (sequence,) = given.sequences
    twice = make_query(replace(given, ids=("A", "B"), sequences=(sequence, sequence)), alignments, made)
    chain = twice.chains[0]
    notices = [*noted(given.notes), *([Notice("no_alignment")] if chain.depth == 1 else [])]
    return Query(given.name, given.ids, given.sequences, (chain,), notices=notices)


def pair_names(names: Sequence[str]) -> dict[tuple[int, int], str]:
    """Name the pairs of each two of some chains, and of each with itself: ONE_and_OTHER, or by their numbers."""
    found: dict[tuple[int, int], str] = {}
    taken: set[str] = set()
    for i, j in combinations_with_replacement(range(len(names)), 2):
        name = f"{names[i]}_and_{names[j]}"
        if name != file_name(name) or name.lower() in taken:  # too long for a file, or a_and_b with c
            name = f"pair_{i + 1}_and_{j + 1}"
        found[i, j] = name
        taken.add(name.lower())
    return found


def all_pairs(chains: Sequence[Query]) -> list[Query]:
    """Return a complex of each two chains, and of each with itself; all share what is known of their chains.

    What is to be said of the input is said of the chains.
    """
    found = []
    for (i, j), name in pair_names([chain.name for chain in chains]).items():
        one, other = chains[i], chains[j]
        both, sequences = (*one.chains, *other.chains), (*one.sequences, *other.sequences)
        outcomes = [*one.outcomes, *(other.outcomes if i != j else ())]
        found.append(Query(name, ("A", "B"), sequences, both, outcomes))
    return found


def lacking_of(query: Complex, alignments: ChainAlignments | None, fixed: Sequence[str] = ()) -> list[str]:
    """Return the sequences of a query that have no alignment; where chains are fixed, of these."""
    own = {alignment.query for alignment in query.alignments}
    asked = [one for id, one in zip(query.ids, query.sequences) if id in fixed or not fixed]
    return [one for one in asked if as_row(one) not in own and not (alignments and alignments.of(one))]


def unused_msa_notices(alignments: ChainAlignments) -> list[Notice]:
    """Return warnings about files of alignments: notes, and files that belong to none of the sequences."""
    found, unused = noted(alignments.notes), alignments.unused
    if unused:
        found.append(Notice("unused_alignments", {"count": len(unused), "detail": shorten_list(unused)}))
    return found


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
    found = dict(zip(each, find_templates(each, sources, most, refused)))
    answered = []
    for query, own in zip(queries, asked):
        by_sequence = {one.sequence: found[one][0] for one in own}
        chains = tuple(
            replace(chain, templates=by_sequence[sequence]) for chain, sequence in zip(query.chains, query.sequences)
        )
        outcomes = [replace(outcome, chains=one.chains) for one in own for outcome in found[one][1]]
        notices = [*query.notices, *template_notices(outcomes, sources)]
        answered.append(replace(query, chains=chains, outcomes=outcomes, notices=notices))
    return answered


def _ask(query: Query, files: Sequence[str], alone: bool) -> list[TemplateQuery]:
    """Return the sequences of a query for which templates are sought.  alone: it is the only query."""
    if not query.is_complex:
        return [TemplateQuery(query.sequences[0], (query.name,), tuple(map(str, files)))]
    chains = dict(zip(query.ids, query.sequences))
    own = files_of_chains(files, chains)
    asked = []
    for sequence, searched in search_names(query.name, chains).items():
        ids = tuple(id for id, other in chains.items() if other == sequence)
        alike = (*ids, *map(file_name, ids)) if alone else ()
        names = (*alike, *(f"{query.name}_{id}" for id in ids), searched)
        asked.append(TemplateQuery(sequence, names, tuple(own[sequence]), ids))
    return asked


def check_guess(given: Any, fixed: Sequence[str], models: Sequence[Params]) -> None:
    """Raise UserError for fixed chains without an initial guess, or for which no model has a place."""
    if fixed and given is None:
        raise UserError("--fixed-chains needs --initial-guess, the structure that the chains are to keep")
    if fixed and not any(model.config.templates.enabled for model in models):
        check_templates(models[0].config, models[0].sample, 1)


def with_guess(query: Query, given: GuessLike, fixed: Sequence[str] = ()) -> Query:
    """Return a query with its initial guess, and notices of what this lacks.  given: SELF for its own structure.

    Errors: UserError for another structure than the query's (`as_guess`), and for fixed chains that it does not have.
    """
    if given is None:
        return query
    if isinstance(given, str) and given == SELF:
        if query.structure is None:
            raise UserError(f"{query.name}: is no structure that it could start from; name a file or a folder instead")
        given = query.structure
    sequences, notices = dict(zip(query.ids, query.sequences)), []
    if unknown := [id for id in fixed if id not in sequences]:
        raise UserError(f"{query.name}: has no chain {unknown[0]} to be fixed; its chains are {', '.join(query.ids)}")
    guess = as_guess(given, query.name, sequences)
    own = dict(zip(guess.names, guess.sequences))
    others = [f"{id} {place}" for id in fixed for place, (a, b) in enumerate(zip(own[id], sequences[id]), 1) if a != b]
    for kind, places in (("guess_gaps", guess.without_beta(sequences)), ("fixed_differs", others)):
        if places:
            notices.append(Notice(kind, {"count": len(places), "detail": shorten_list(places)}))
    return replace(query, guess=guess, fixed=tuple(fixed), notices=[*query.notices, *notices])


def with_guesses(
    found: Mapping[str, Query | UserError], given: Any, fixed: Sequence[str]
) -> dict[str, Query | UserError]:
    """Return queries with their initial guesses, or why one cannot have it.  given: as `--initial-guess`.

    Errors: UserError for a folder without structures.
    """
    files = None if given is None or given == SELF else GuessFiles(arguments.path("initial_guess", given))
    guessed: dict[str, Query | UserError] = {}
    for name, one in found.items():
        try:
            own = given if files is None or isinstance(one, UserError) else files.of(name)
            guessed[name] = one if isinstance(one, UserError) else with_guess(one, own, fixed)
        except UserError as error:
            guessed[name] = error
    return guessed


def query_of(
    sequence: Sequences,
    alignment: Alignments,
    name: str,
    fetch: FetchAlignments | None = None,
    fixed: Sequence[str] = (),
) -> Query:
    """Make a query of Python's arguments: a protein, or a complex of several chains, with its alignments.

    sequence: one letter per residue; A:B, a list, or chain -> sequence for a complex.  alignment: rows, an `Alignment`,
    or files; of a complex one for each chain in their order, chain -> alignment, or files, each of the chain that is
    its first row.  fetch: gets alignments of sequences that have none; fixed: as of `read_given`.
    Errors: WrongArgument for what is nothing of these; UserError for letters that are not residues, files that cannot
    be read, and rows that do not fit.
    """
    chains = _chains(sequence, name)
    for id, letters in chains.items():
        encode(letters, name if len(chains) == 1 else f"{name} {id}")  # an error for letters that are not residues
    alone = isinstance(sequence, str) and len(chains) == 1
    files, notices, found = None, list[Notice](), list[Alignment]()
    if alone:
        found = _of_chain(chains["A"], alignment, name, notices)
    elif _is_path(alignment) or _is_paths(alignment):
        files = read_chain_alignments(paths("alignment", alignment), chains.values(), name)
        notices = unused_msa_notices(files)
    else:
        found = _of_chains(chains, alignment, name, notices)
    given = Complex(name, tuple(chains), tuple(chains.values()), tuple(found))
    if fetch is not None and (without := lacking_of(given, files, fixed)):
        answers = read_chain_alignments(fetch([(given, without)]), chains.values(), name)
        files = answers if files is None else files.joined(answers)
    query = make_query(given, files)
    return replace(query, notices=[*notices, *query.notices] if found or files else notices)  # nothing given: as asked


def _chains(sequence: Any, name: str) -> dict[str, str]:
    """Return the letters of the chains by their names; a protein given as a text is chain A."""
    if isinstance(sequence, str):
        if not sequence.strip():
            raise UserError(f"{name}: the sequence has no residues; give a letter for each")
        if not set(sequence).isdisjoint("./"):
            raise UserError(f"{name}: sequence = {shown(sequence)}: is no sequence; a file is folded by fold_many")
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


def _of_chains(chains: Mapping[str, str], given: Any, name: str, notices: list[Notice]) -> list[Alignment]:
    """Return the alignments of a complex, given chain by chain.  notices: gets what is to be said of their files."""
    if given is not None and not isinstance(given, Mapping) and not is_list(given):
        raise WrongArgument(f"alignment = {shown(given)}: files, a list or a mapping of chains is needed")
    given = () if given is None else given
    each = given if isinstance(given, Mapping) else dict(zip(chains, given))
    if unknown := [id for id in each if id not in chains]:
        raise UserError(f"{name}: an alignment for chain {unknown[0]}, but the chains are {', '.join(chains)}")
    if not chains or len(each) < len(given):
        raise UserError(f"{name}: {len(chains)} chains and {len(given)} alignments; give one for each, or none")
    return [one for id, rows in each.items() for one in _of_chain(chains[id], rows, f"{name} {id}", notices)]


def _of_chain(sequence: str, given: Any, name: str, notices: list[Notice]) -> list[Alignment]:
    """Return the alignments of one sequence: of rows, as in A3M, one, in which the sequence may be or not."""
    if given is None:
        return []
    if isinstance(given, Alignment):
        return [given.check_query(sequence, name)]
    if _is_path(given) or (_is_paths(given) and not any(isinstance(one, str) for one in given)):  # texts are rows
        read = read_chain_alignments(paths("alignment", given), [sequence], name)
        notices += unused_msa_notices(read)
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
    (found,) = with_templates([query], sources, [model])
    return replace(found, notices=[*sources.notices, *found.notices])


def fetching(
    server: "AlignmentServer", check: Callable[[Complex], None], tell: Progress = no_progress
) -> FetchAlignments:
    """Return a fetcher of the alignments that queries lack.  check: given each query, before any is sent.

    Errors: UserError as of `data.search.fetch.alignments_of`.
    """

    def fetch(lacking: Sequence[tuple[Complex, list[str]]]) -> list[Path]:
        from warpfold.data.search.fetch import alignments_of, wanted_of

        for one, _ in lacking:
            check(one)
        return alignments_of(server, [wanted_of(one, without) for one, without in lacking], tell)

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
    """Read many queries, with their templates, or why one cannot be folded, by name and in their order.

    together, fetch, check: as of `read_given`.  complete: adds templates to a query.  guesses: as of `with_guesses`; or
    a list, or by name.
    Errors: WrongArgument; ServerGone, without which no other query would be better off.
    """
    from warpfold.data.search.server import ServerGone

    found: dict[str, Query | UserError] = {}
    named: Mapping[str, Any] = {}
    if (files := _files_of(sequences)) is not None:
        read = read_given(files, paths("alignments", alignments), together, fetch, check, fixed)
        for notice in read.notices:
            logging.getLogger("warpfold").warning("%s", notice.text)
        found, aligned = dict(read.found), {}
    else:
        if not isinstance(sequences, Mapping) and not is_list(sequences):
            raise WrongArgument(f"sequences = {shown(sequences)}: a list, name -> sequence, or a file is needed")
        numbered = not isinstance(sequences, Mapping)
        named = {f"query_{i}": one for i, one in enumerate(sequences, 1)} if numbered else sequences
        if wrong := [name for name in named if not isinstance(name, str) or not name]:
            raise WrongArgument(f"sequences: the name {shown(wrong[0])}: a text is needed")
        aligned = _each("alignments", alignments, list(named))
    offered = _each("templates", templates, [*(found or named)])
    by_name = isinstance(guesses, Mapping) or is_list(guesses)
    each_guess = _each("initial_guess", guesses if by_name else None, [*offered])
    for name in offered:
        try:
            one = found[name] if name in found else query_of(named[name], aligned[name], name, fetch, fixed)
            if not isinstance(one, UserError):
                one = with_guess(complete(one, offered[name]), each_guess[name], fixed)
            found[name] = one
        except (WrongArgument, ServerGone, StorageError):
            raise
        except UserError as error:
            found[name] = error
    return found if guesses is None or by_name else with_guesses(found, guesses, fixed)


def _files_of(sequences: Any) -> list[Given] | None:
    """Return the files, folders and texts that are read as by `warpfold predict`; None for sequences themselves.

    Of a list with a file in it, every text is a file's name or a sequence.
    """
    if isinstance(sequences, str | os.PathLike):
        if isinstance(sequences, str) and sequences != "-" and not Path(sequences).exists():
            raise WrongArgument(f"sequences = {shown(sequences)}: no such file; give a list for sequences: [...]")
        return [sequences if sequences == "-" else Path(sequences)]
    if is_list(sequences) and any(map(_is_file, sequences)):
        return [Path(one) if _is_file(one) else one for one in arguments.queries("sequences", sequences)]
    return None


def _is_file(one: Any) -> bool:
    """Return whether this is a file's name, and no sequence: letters, * and - alone."""
    return isinstance(one, os.PathLike) or (isinstance(one, str) and not set(one).isdisjoint("./"))


def _each(what: str, given: Any, names: Sequence[str]) -> dict[str, Any]:
    """Match values with names: given by name, or in the order of the names; None for all if nothing is given."""
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
