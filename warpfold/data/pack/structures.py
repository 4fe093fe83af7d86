"""The structure files of a part: read, matched, built, kept; and whether an answer of an earlier run still holds."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

from warpfold.data.formats.input_files import InputFile
from warpfold.data.pack.build import BuildJob, Built, ChainJob, Options, Read, build, library_of, read_chains
from warpfold.data.pack.queries import Matching
from warpfold.data.pack.report import Entry
from warpfold.data.pack.work import DIED, Call, Task, Work


class Structures:
    """The structure files of a part, as jobs.

    An answer says from what it was made: the inputs of the run; the file; the chains with their sequences and what
    was found to belong to them; the templates' files.  So a run with other inputs keeps what is the same for them.
    folders: of the templates' structures.
    """

    def __init__(self, work: Work, matching: Matching, options: Options, folders: tuple[Path, ...]) -> None:
        self.work, self.matching, self.options, self.folders = work, matching, options, folders
        self._inputs = _digest(work.writer.plan["inputs"])
        self._read: dict[Task, tuple[list[Entry], list[ChainJob], list[list[str]]]] = {}  # of files that are built now

    def hold(self, file: InputFile) -> bool:
        """Return whether there is an answer for a file, and it is what doing the job again would give."""
        answer = self.work.writer.answers.get(f"structure {file.name}")
        if answer is None:
            return False
        made = answer.data["from"]
        if made["inputs"] == self._inputs:
            return True
        if made["file"] != [file.size, file.changed]:
            return False
        if made["match"] != _digest([_versions(self.matching.find(*chain)) for chain in made["chains"]]):
            return False
        looked_up = made["looked_up"].split()
        return not looked_up or (
            bool(self.folders) and library_of(self.folders, self.options.limit).digest(looked_up) == made["library"]
        )

    def do(self, files: Sequence[InputFile]) -> Iterator[InputFile]:
        """Yield each file when its answer is kept."""
        names = {f"structure {file.name}": file for file in files}
        tasks = (Task((name,), (read_chains, (file, self.options))) for name, file in names.items())
        for task, result in self.work.do(tasks, self._next):
            (name,) = task.names
            self._add(name, names[name], result, *self._read.pop(task, ([], [], [])))
            yield names[name]

    def _next(self, task: Task, result: Read | Built) -> Call | None:
        """Return the call that builds what was read, if there are chains to keep."""
        if isinstance(result, Built):
            return None
        structure = result.structure
        chains = structure.chains if structure else {}
        keys = [[f"{structure.id}_{name}", name, chain.sequence] for name, chain in chains.items()] if structure else []
        jobs = [self.matching.find(*key) for key in keys]
        self._read[task] = (result.dropped, jobs, keys)
        if structure is None or not jobs:
            return None
        return build, BuildJob(result.file, structure, jobs, self.options, self.folders)

    def _add(
        self,
        name: str,
        file: InputFile,
        result: Read | Built | None,
        dropped: list[Entry],
        jobs: list[ChainJob],
        keys: list[list[str]],
    ) -> None:
        """Keep the answer of a file; `result` is None if its process died of it."""
        built = result if isinstance(result, Built) else Built([])
        if result is None:
            dropped = [Entry(file.title, file.name, False, f"{file.name}: {DIED}")]
        made = {
            "inputs": self._inputs,
            "file": [file.size, file.changed],
            "chains": keys,
            "match": _digest([_versions(job) for job in jobs]),
            "looked_up": " ".join(built.looked_up),
            "library": built.library,
        }
        answer = {"entries": [*map(asdict, dropped), *built.entries], "bad": built.bad, "from": made}
        self.work.writer.add(name, answer, [record.data for record in built.records])


def _versions(job: ChainJob) -> list[Any]:
    """Return what belongs to a chain, as JSON can hold it."""
    return [job.chain, [one.version for one in job.alignments], [one.version for one in job.hits], job.note]


def _digest(value: Any) -> str:
    return blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()
