"""What a run remembers of its examples: the order in which it used them, and the entries that it could not use.

    DIR/order.txt           "PLACE EXAMPLE AGAIN" for each example, written before it is used: its position, its
                            number, how often its entry was drawn again; of equal positions the last line counts.
                            With D data ranks each has its own file, order-0-of-D.txt ...
    DIR/quarantine.jsonl    the entries that were set aside, with the reason

Both are only appended to, so that a `kill -9` loses no example that was used.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import count, takewhile
from pathlib import Path

from warpfold.data.load.schedule import Draw, State
from warpfold.engine.checkpoint import AppendedFile
from warpfold.errors import UserError
from warpfold.parallel.team import Team

HEADER = "# warpfold order 1 "


class Ledger:
    """The files of the run in `folder`; each data rank has used `place` examples, all together those in `state`.

    data: a fingerprint of all that decides which entry an example is.  replay: another run's order.txt to follow; with
    several data ranks, each follows its own file beside it.  All processes of `team` must make theirs at the same time.
    Errors: UserError for an order of other data, or a `replay` that does not continue this run.
    """

    def __init__(
        self, folder: Path, data: str, place: int, state: State, replay: Path | None = None, team: Team | None = None
    ) -> None:
        team = team or Team()
        ranks = team.mesh.data
        self._path = folder / ("order.txt" if ranks.size == 1 else f"order-{ranks.rank}-of-{ranks.size}.txt")
        self._place = place
        self._order = AppendedFile(self._path, HEADER + data + "\n") if team.is_example_leader else None
        self._aside = AppendedFile(folder / "quarantine.jsonl") if team.is_rank_zero else None
        self._known = dict(_lines(self._path, data, place)) if team.is_example_leader else {}
        if replay is not None and ranks.size > 1:
            replay = replay.with_name(self._path.name)
        ahead = self._known if replay is None else dict(_lines(replay, data, place))
        own = list(takewhile(lambda draw: draw is not None, map(ahead.get, count(place))))  # without a gap
        aside: list[str] = []
        if team.is_rank_zero:
            path = folder / "quarantine.jsonl"
            try:
                entries = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
                aside = list(dict.fromkeys(entry["name"] for entry in entries))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise UserError(f"{path}: damaged; remove it, and its entries are tried again") from error
        said = team.all_gather_object([own, aside], "reading what the run has used")
        self.quarantined: list[str] = said[0][1]
        self.replay = [
            [Draw(*draw) for draw in draws] for draws, _ in team.of_example_leaders(said)
        ]  # of every data rank
        if not _follows(self.replay, state):
            if replay is not None:
                raise UserError(f"{replay}: has examples twice, or some that this run has used already")
            self.replay = []  # the files are from when the run had other ranks
        self._unshared: list[tuple[str, int, str]] = []  # set aside here; the other ranks do not know yet

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._order, self._aside):
            if file is not None:
                file.close()

    def use(self, draw: Draw) -> None:
        """Note that this is the next example."""
        if self._order is not None and self._known.get(self._place) != draw:
            self._order.write(f"{self._place} {draw.number} {draw.again}\n")
        self._place += 1

    def set_aside(self, name: str, index: int, reason: str) -> None:
        """Note an entry that cannot be used; `index` is the example that it was to be."""
        if self._aside is not None:
            self._aside.write(json.dumps({"name": name, "example": index, "reason": reason}) + "\n")
        self.quarantined.append(name)
        self._unshared.append((name, index, reason))

    @property
    def unshared(self) -> int:
        """The number of entries that were set aside since the last `take_unshared`."""
        return len(self._unshared)

    def take_unshared(self) -> list[tuple[str, int, str]]:
        """Return the entries that were set aside since the last call: name, index, reason."""
        taken, self._unshared = self._unshared, []
        return taken


def _follows(replay: Sequence[Sequence[Draw]], state: State) -> bool:
    """Return whether a run that has used what is in `state` can use these next."""
    numbers = [draw.number for draws in replay for draw in draws]
    used = (number for number in numbers if number < state.first or number in state.early)
    return len(set(numbers)) == len(numbers) and next(used, None) is None


def _lines(path: Path, data: str, place: int) -> Iterator[tuple[int, Draw]]:
    """Yield what was used from `place` on, position by position."""
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
