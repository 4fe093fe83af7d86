"""Get the alignments of proteins and complexes from the server that the user has named (docs/howto/alignments.md).

One ticket at a time, a sequence each; of a complex another one, for the pairs of its chains.
What is kept is not asked for again.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warpfold import __version__
from warpfold.data.example.query_files import Complex, Given, read_complexes, search_names
from warpfold.data.search.database import REPORT_FORMAT, check_output, unsearchable_reason
from warpfold.data.search.server import MSA, PAIR, AlignmentServer, NoAnswer, ServerGone
from warpfold.errors import UserError, listed
from warpfold.files import update_file
from warpfold.progress import Progress, no_progress


@dataclass(frozen=True)
class Wanted:
    """A protein or a complex, and what is to be asked for: sequences, by the names of their results, and pairs."""

    name: str
    sequences: Mapping[str, str]  # name -> sequence, each sequence once
    paired: bool = False  # all of them


@dataclass
class Fetched:
    """Files of a server's answers by sequence, files of pairs by the complex, and why there is none by name."""

    alignments: dict[str, list[Path]] = field(default_factory=dict)
    pairs: dict[str, list[Path]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def wanted_of(query: Complex, lacking: Sequence[str] | None = None) -> Wanted:
    """Name the sequences to ask for of a protein or a complex.

    lacking: those that have no alignment (None: all); pairs are asked for only if none has.
    """
    names = search_names(query.name, dict(zip(query.ids, query.sequences)))
    asked = {own: sequence for sequence, own in names.items() if lacking is None or sequence in lacking}
    return Wanted(query.name, asked, paired=len(asked) == len(names) > 1)


def fetch(server: AlignmentServer, wanted: Sequence[Wanted], progress: Progress = no_progress) -> Fetched:
    """Ask a server for all that is wanted and not known; a protein that fails is named, and the others go on.

    Errors: UserError if the server does not answer, or is under maintenance; what it has answered is kept.
    """
    found = Fetched()
    names: dict[str, list[str]] = {}
    for one in wanted:
        for name, sequence in one.sequences.items():
            names.setdefault(sequence, []).append(name)
    asked: list[tuple[str, list[str], Sequence[str]]] = [(MSA, own, (sequence,)) for sequence, own in names.items()]
    asked += [(PAIR, [one.name], tuple(one.sequences.values())) for one in wanted if one.paired]
    reasons = {sequence: reason for sequence in names if (reason := unsearchable_reason(sequence))}
    unknown = [one for one in asked if not reasons.keys() & {*one[2]} and server.known(one[0], one[2]) is None]
    if first := list(dict.fromkeys(own[0] for _, own, _ in unknown)):  # said before they leave this machine
        count = len({sequence for _, _, sequences in unknown for sequence in sequences})
        what = "1 sequence" if count == 1 else f"{count} sequences"
        server.say(f"sending {what} to {server.url} ({listed(first)}); answers are kept in {server.cache}")
    for done, (endpoint, own, sequences) in enumerate(asked):
        progress(done, len(asked), f"asking {server.url} for {own[0]}")
        try:
            if refused := [reasons[one] for one in sequences if one in reasons]:
                raise NoAnswer(refused[0])
            if endpoint == PAIR:
                found.pairs[own[0]] = server.pairs(sequences)
            else:
                found.alignments[sequences[0]] = server.alignments(sequences[0])
        except NoAnswer as error:
            found.failures |= dict.fromkeys(own, str(error))
        except ServerGone as error:
            raise ServerGone(f"{own[0]}: {error}") from None
    return found


def search_by_server(
    queries: Sequence[Given], server: AlignmentServer, out: Path, progress: Progress = no_progress
) -> dict[str, Any]:
    """Ask a server for the alignments of every protein, and every different chain of complexes; return the report.

    Writes NAME/*.a3m, pairs of a complex as COMPLEX/pair.a3m, template hits as NAME/*.m8, and `search.json`.
    Errors: UserError as in `fetch`.
    """
    start = time.perf_counter()
    check_output(out)
    wanted = [wanted_of(one) for one in read_complexes(list(queries))]
    _report(out, server, "running")
    fetched = fetch(server, wanted, progress)
    proteins = []
    for one in wanted:
        for name, sequence in one.sequences.items():
            if sequence in fetched.alignments:
                files = _written(fetched.alignments[sequence], out / name, name)
                proteins.append({"name": name, "length": len(sequence), "databases": files})
        if one.name in fetched.pairs:
            files = _written(fetched.pairs[one.name], out / one.name, None)
            proteins.append({"name": one.name, "length": sum(map(len, one.sequences.values())), "databases": files})
    seconds = round(time.perf_counter() - start, 3)
    failures = [{"name": name, "error": error} for name, error in fetched.failures.items()]
    return _report(out, server, "failed" if failures else "complete", proteins, failures, seconds)


def _report(
    out: Path,
    server: AlignmentServer,
    status: str,
    proteins: Sequence[Mapping[str, Any]] = (),
    failures: Sequence[Mapping[str, str]] = (),
    seconds: float = 0.0,
) -> dict[str, Any]:
    """Write `search.json` and return it."""
    report = {
        "format": REPORT_FORMAT,
        "warpfold": __version__,
        "status": status,
        "part": None,
        "databases": [],
        "server": server.url,
        "proteins": [*proteins],
        "failures": [*failures],
        "seconds": seconds,
    }
    update_file(out / "search.json", (json.dumps(report, indent=1) + "\n").encode())
    return report


def _written(files: Sequence[Path], folder: Path, name: str | None) -> dict[str, Any]:
    """Copy a server's answer into a protein's folder, and return what the report says of it.

    name: what its first row is called; None: it is of several chains.
    """
    found = {}
    for file in files:
        text = file.read_text(encoding="utf-8")
        if name is not None and file.suffix == ".a3m":
            text = f">{name}\n" + text.partition("\n")[2]
        update_file(folder / file.name, text.encode())
        rows = text.partition("\0")[0].count(">") - 1 if file.suffix == ".a3m" else text.count("\n")
        found[file.name.removesuffix(file.suffix)] = {"file": f"{folder.name}/{file.name}", "hits": rows}
    return found


def alignments_of(server: AlignmentServer, wanted: Sequence[Wanted], progress: Progress = no_progress) -> list[Path]:
    """Return the files of all alignments that are wanted, and their pairs.

    Errors: UserError as in `fetch`, and if there is none for some.
    """
    fetched = fetch(server, wanted, progress)
    if fetched.failures:
        (name, why), count = next(iter(fetched.failures.items())), len(fetched.failures)
        also = "" if count == 1 else f" ({', '.join(list(fetched.failures)[1:4])}{' ...' if count > 4 else ''} too)"
        raise UserError(
            f"{name}: {why}{also}. Other answers are kept in {server.cache}: give alignments of these by "
            "--msa, leave them out, or try again"
        )
    every = [file for files in (*fetched.alignments.values(), *fetched.pairs.values()) for file in files]
    return [file for file in every if file.suffix == ".a3m"]  # without those of hits
