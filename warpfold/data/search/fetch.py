"""Fetch the alignments of proteins and complexes from the user's alignment server (docs/howto/alignments.md).

Sequences are requested one at a time, followed by the paired alignments of complexes. Cached answers are not requested
again.
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
class ServerRequest:
    """The requests for a protein or a complex.

    sequences: unique sequences by the names of their results. paired: also request the pairs of all sequences.
    """

    name: str
    sequences: Mapping[str, str]
    paired: bool = False


@dataclass
class Fetched:
    """The files of a server's answers by sequence, the files of pairs by complex, and the errors by name."""

    alignments: dict[str, list[Path]] = field(default_factory=dict)
    pairs: dict[str, list[Path]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def make_request(query: Complex, lacking: Sequence[str] | None = None) -> ServerRequest:
    """Name the sequences of a protein or a complex to request.

    lacking: the sequences without an alignment; None for all. Pairs are requested only if all sequences are.
    """
    names = search_names(query.name, dict(zip(query.ids, query.sequences)))
    sequences = {name: sequence for sequence, name in names.items() if lacking is None or sequence in lacking}
    return ServerRequest(query.name, sequences, paired=len(sequences) == len(names) > 1)


def fetch(server: AlignmentServer, requests: Sequence[ServerRequest], progress: Progress = no_progress) -> Fetched:
    """Request all answers that are not cached. A failure of a protein is recorded, and the others continue.

    Raises UserError if the server does not answer or is under maintenance. Its earlier answers are cached.
    """
    fetched = Fetched()
    names_of: dict[str, list[str]] = {}
    for request in requests:
        for name, sequence in request.sequences.items():
            names_of.setdefault(sequence, []).append(name)
    # Endpoint, names and sequences of each call.
    calls: list[tuple[str, list[str], Sequence[str]]]
    calls = [(MSA, names, (sequence,)) for sequence, names in names_of.items()]
    calls += [(PAIR, [request.name], tuple(request.sequences.values())) for request in requests if request.paired]
    reasons = {sequence: reason for sequence in names_of if (reason := unsearchable_reason(sequence))}
    new = [call for call in calls if not reasons.keys() & {*call[2]} and server.cached(call[0], call[2]) is None]
    # The user must know which sequences leave this machine.
    if first_names := list(dict.fromkeys(names[0] for _, names, _ in new)):
        count = len({sequence for _, _, sequences in new for sequence in sequences})
        subject = "1 sequence" if count == 1 else f"{count} sequences"
        server.say(f"sending {subject} to {server.url} ({listed(first_names)}); answers are kept in {server.cache}")
    for done, (endpoint, names, sequences) in enumerate(calls):
        progress(done, len(calls), f"asking {server.url} for {names[0]}")
        try:
            if refused := [reasons[sequence] for sequence in sequences if sequence in reasons]:
                raise NoAnswer(refused[0])
            if endpoint == PAIR:
                fetched.pairs[names[0]] = server.pairs(sequences)
            else:
                fetched.alignments[sequences[0]] = server.alignments(sequences[0])
        except NoAnswer as error:
            fetched.failures |= dict.fromkeys(names, str(error))
        except ServerGone as error:
            raise ServerGone(f"{names[0]}: {error}") from None
    return fetched


def search_by_server(
    queries: Sequence[Given], server: AlignmentServer, out: Path, progress: Progress = no_progress
) -> dict[str, Any]:
    """Fetch the alignments of every protein and every unique chain of complexes. Returns the report.

    Writes NAME/*.a3m, pairs of a complex as COMPLEX/pair.a3m, template hits as NAME/*.m8, and `search.json`.
    Raises the errors of `fetch`.
    """
    start = time.perf_counter()
    check_output(out)
    requests = [make_request(query) for query in read_complexes(list(queries))]
    _write_report(out, server, "running")
    fetched = fetch(server, requests, progress)
    proteins = []
    for request in requests:
        for name, sequence in request.sequences.items():
            if sequence in fetched.alignments:
                files = _copy_answer(fetched.alignments[sequence], out / name, name)
                proteins.append({"name": name, "length": len(sequence), "databases": files})
        if request.name in fetched.pairs:
            files = _copy_answer(fetched.pairs[request.name], out / request.name, None)
            length = sum(map(len, request.sequences.values()))
            proteins.append({"name": request.name, "length": length, "databases": files})
    seconds = round(time.perf_counter() - start, 3)
    failures = [{"name": name, "error": error} for name, error in fetched.failures.items()]
    return _write_report(out, server, "failed" if failures else "complete", proteins, failures, seconds)


def _write_report(
    out: Path,
    server: AlignmentServer,
    status: str,
    proteins: Sequence[Mapping[str, Any]] = (),
    failures: Sequence[Mapping[str, str]] = (),
    seconds: float = 0.0,
) -> dict[str, Any]:
    """Write `search.json`, and return its content."""
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


def _copy_answer(files: Sequence[Path], folder: Path, name: str | None) -> dict[str, Any]:
    """Copy a server's answer into a protein's folder; returns its entry in the report.

    name: for the first row; None for an answer of several chains.
    """
    databases = {}
    for file in files:
        text = file.read_text(encoding="utf-8")
        if name is not None and file.suffix == ".a3m":
            text = f">{name}\n" + text.partition("\n")[2]
        update_file(folder / file.name, text.encode())
        rows = text.partition("\0")[0].count(">") - 1 if file.suffix == ".a3m" else text.count("\n")
        databases[file.name.removesuffix(file.suffix)] = {"file": f"{folder.name}/{file.name}", "hits": rows}
    return databases


def fetch_alignments(
    server: AlignmentServer, requests: Sequence[ServerRequest], progress: Progress = no_progress
) -> list[Path]:
    """Fetch all alignments and pairs; returns their files.

    Raises the errors of `fetch`, and UserError if any request fails.
    """
    fetched = fetch(server, requests, progress)
    if fetched.failures:
        (name, cause), count = next(iter(fetched.failures.items())), len(fetched.failures)
        also = "" if count == 1 else f" ({', '.join(list(fetched.failures)[1:4])}{' ...' if count > 4 else ''} too)"
        raise UserError(
            f"{name}: {cause}{also}. Pass alignments of these with --msa, remove them, or try again; other answers are "
            f"kept in {server.cache}."
        )
    files_of_all = [file for files in (*fetched.alignments.values(), *fetched.pairs.values()) for file in files]
    # The other files are template hits.
    return [file for file in files_of_all if file.suffix == ".a3m"]
