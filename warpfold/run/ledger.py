"""What a run remembers of its examples: the order in which they were used, and the entries that could not be.

    DIR/order.txt           "PLACE EXAMPLE AGAIN" for each example, written before it is used: the how manieth it was,
                            its number, how often its entry was drawn anew; of equal places the last line counts
    DIR/quarantine.jsonl    the entries that were set aside, with the reason

Both are only ever added to, so that a `kill -9` loses nothing that was used.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from warpfold.data.schedule import Draw, State
from warpfold.errors import UserError

HEADER = "# warpfold order 1 "


class Ledger:
    """The two files of the run in `folder`, which has used `place` examples, those in `state`.

    data: a fingerprint of all that decides which entry an example is.  replay: another run's order.txt to follow.
    Errors: UserError for an order of other data, or one that does not continue this run.
    """

    def __init__(self, folder: Path, data: str, place: int, state: State, replay: Path | None = None) -> None:
        self._path, self._place = folder / "order.txt", place
        self._known = dict(_lines(self._path, data, place)) if self._path.exists() else {}
        ahead = self._known if replay is None else dict(_lines(replay, data, place))
        self.replay: list[Draw] = []  # what was used from `place` on, without a gap
        while (draw := ahead.get(place + len(self.replay))) is not None:
            self.replay.append(draw)
        numbers = {draw.number for draw in self.replay}
        used = (draw.number for draw in self.replay if draw.number < state.first or draw.number in state.early)
        if len(numbers) < len(self.replay) or next(used, None) is not None:
            raise UserError(f"{replay or self._path}: has examples twice, or some that this run has used already")
        self._order = _Appended(self._path, HEADER + data + "\n")
        self._aside = _Appended(folder / "quarantine.jsonl")
        self.quarantined = _quarantined(folder / "quarantine.jsonl")

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._order.close()
        self._aside.close()

    def use(self, draw: Draw) -> None:
        """The next example is this one."""
        if self._known.get(self._place) != draw:
            self._order.write(f"{self._place} {draw.number} {draw.again}\n")
        self._place += 1

    def set_aside(self, name: str, index: int, reason: str) -> None:
        """An entry cannot be used; `index` is the example that it was."""
        self._aside.write(json.dumps({"name": name, "example": index, "reason": reason}) + "\n")
        self.quarantined.append(name)


class _Appended:
    """A text file that is added to, line by line, each on the disk's way before `write` returns."""

    def __init__(self, path: Path, header: str = "") -> None:
        self.path = path
        with suppress(FileNotFoundError), open(path, "rb+") as file:  # a line that a kill left torn goes
            text = file.read()
            file.truncate(text.rfind(b"\n") + 1)
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by the ledger)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from error
        if header and not self._file.tell():
            self.write(header)

    def write(self, line: str) -> None:
        data = line.encode()
        try:
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}; make room and start again") from error

    def close(self) -> None:
        self._file.close()


def _lines(path: Path, data: str, place: int) -> Iterator[tuple[int, Draw]]:
    """What was used from `place` on, place by place."""
    try:
        with open(path, encoding="ascii") as file:
            header = file.readline()
            if not header.startswith(HEADER):
                raise UserError(f"{path}: not the order.txt of a run")
            if header != HEADER + data + "\n":
                raise UserError(f"{path}: the order of a run with other data, another seed or another split")
            for line in file:
                if line.endswith("\n"):
                    at, index, again = map(int, line.split())
                    if at >= place:
                        yield at, Draw(index, again)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: damaged, or not the order.txt of a run") from error


def _quarantined(path: Path) -> list[str]:
    try:
        entries: list[Mapping[str, str]] = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        return list(dict.fromkeys(entry["name"] for entry in entries))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged; remove it, and its entries are tried again") from error
