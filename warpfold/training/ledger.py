"""Record the examples of a run in the order in which they are used, and the entries that cannot be used.

    DIR/order.txt           "PLACE EXAMPLE AGAIN" for each example, written before it is used: its position, its
                            number, and how often its entry was drawn again.  If a position has several lines, the last
                            one counts.  Each of D data ranks has its own file, order-0-of-D.txt ...
    DIR/quarantine.jsonl    the entries that cannot be used, with the reasons

Both files are only appended to, so that a `kill -9` loses no example that was used.
"""

import json
from collections.abc import Iterator
from itertools import count, takewhile
from pathlib import Path

from warpfold.data.load.schedule import Draw, State
from warpfold.engine.checkpoint import AppendedFile
from warpfold.errors import UserError
from warpfold.parallel.team import Team

HEADER = "# warpfold order 1 "


class Ledger:
    """The record of the run in `folder`.  Each data rank has used `place` examples, and all together those in `state`.

    data: a fingerprint of everything that decides which entry an example is.
    replay: order.txt of another run to follow.  With several data ranks each follows its own file in the same folder.
    All processes of `team` create their ledgers at the same time.
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
        self._quarantine = AppendedFile(folder / "quarantine.jsonl") if team.is_rank_zero else None
        self._recorded = dict(_read_order(self._path, data, place)) if team.is_example_leader else {}
        if replay is not None and ranks.size > 1:
            replay = replay.with_name(self._path.name)
        draws = self._recorded if replay is None else dict(_read_order(replay, data, place))
        # Only the draws before the first gap can be repeated.
        own_draws = list(takewhile(lambda draw: draw is not None, map(draws.get, count(place))))
        quarantined: list[str] = []
        if team.is_rank_zero:
            path = folder / "quarantine.jsonl"
            try:
                entries = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
                quarantined = list(dict.fromkeys(entry["name"] for entry in entries))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise UserError(f"{path}: damaged. Remove it, and its entries are tried again.") from error
        # Every rank needs the draws of all data ranks, to know the examples that are left.
        gathered = team.all_gather_object([own_draws, quarantined], "reading what the run has used")
        self.quarantined: list[str] = gathered[0][1]
        # For each data rank, the draws that it uses again.
        self.replay = [[Draw(*draw) for draw in draws] for draws, _ in team.of_example_leaders(gathered)]
        numbers = [draw.number for rank_draws in self.replay for draw in rank_draws]
        used = any(number < state.first or number in state.early for number in numbers)
        if used or len(set(numbers)) < len(numbers):
            if replay is not None:
                raise UserError(f"{replay}: has examples twice, or some that this run has used already")
            # The files were written when the run had another number of ranks.
            self.replay = []
        self._unshared: list[tuple[str, int, str]] = []  # entries that other ranks do not know yet

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._order, self._quarantine):
            if file is not None:
                file.close()

    def use(self, draw: Draw) -> None:
        """Record the next example."""
        if self._order is not None and self._recorded.get(self._place) != draw:
            self._order.write(f"{self._place} {draw.number} {draw.again}\n")
        self._place += 1

    def set_aside(self, name: str, index: int, reason: str) -> None:
        """Record an entry that cannot be used; `index` is the number of its example."""
        if self._quarantine is not None:
            self._quarantine.write(json.dumps({"name": name, "example": index, "reason": reason}) + "\n")
        self.quarantined.append(name)
        self._unshared.append((name, index, reason))

    @property
    def unshared(self) -> int:
        """The number of entries recorded since the last `take_unshared`."""
        return len(self._unshared)

    def take_unshared(self) -> list[tuple[str, int, str]]:
        """Return the entries recorded since the last call: name, index, reason."""
        unshared, self._unshared = self._unshared, []
        return unshared


def _read_order(path: Path, data: str, place: int) -> Iterator[tuple[int, Draw]]:
    """Yield the positions from `place` on, with their draws."""
    try:
        with open(path, encoding="ascii") as file:
            header = file.readline()
            if not header.startswith(HEADER):
                raise UserError(f"{path}: not the order.txt of a run")
            if header != HEADER + data + "\n":
                raise UserError(f"{path}: the order of a run with other data, another seed or another split")
            for line in file:
                if line.endswith("\n"):
                    position, number, repetition = map(int, line.split())
                    if position >= place:
                        yield position, Draw(number, repetition)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: damaged, or not the order.txt of a run") from error
