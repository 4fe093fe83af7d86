"""A witness of silent corruption: at a share of the steps, all that was computed is computed again, and bits compared.

A device that computes wrongly once in a while, or memory that loses a bit, raises no error.  But what a rank computes
in a step follows from the weights and its examples, never from the rank or the clock.  So at steps that the seed draws

    rest        each rank compares what stays from step to step (weights, moments ...) with what it was when the step
                began
    replicas    ranks that hold the same compare it
    work        each rank computes the examples of another once more: the sum of their clipped gradients, their losses
    messages    each rank compares what arrived with what was sent; sums over ranks are made twice
    update      each rank makes its update twice

Checksums are compared, so that ranks tell each other a few numbers.  docs/training.md says what is found, and what not.
"""

import logging
import platform
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from warpfold.errors import UserError, listed
from warpfold.keyed import keyed_rng
from warpfold.parallel.exchange import Wire, followed
from warpfold.parallel.mesh import Group
from warpfold.parallel.reducer import row_checksums
from warpfold.parallel.team import Team
from warpfold.parallel.waits import Work

log = logging.getLogger("warpfold.plan")
T = TypeVar("T", bound=Hashable)
Sums = dict[str, Tensor]  # checksums, int64, by what they are of; each of so many parts (`Checked.parts`)
Batches = Sequence[Sequence[Any]]  # a rank's examples of a step, each as JSON-able values from which it is made again
Again = Callable[[Batches], Sums]


class Checked(Protocol):
    """What holds the state of a training, and updates it."""

    updates: list[Sums]  # after the last update, made twice

    def witness(self, on: bool) -> None:
        """Have the step that begins be one that is witnessed, or not."""
        ...

    def checksums(self) -> Sums:
        """Return checksums of all that stays from step to step."""
        ...

    def parts(self, what: str) -> tuple[int, list[str]]:
        """Say of a kind of checksums which shard it is of (-1: of the whole), and what each is of."""
        ...


@dataclass(frozen=True)
class Finding:
    """Something that is not what it should be.

    ranks: those that were wrong, where that could be told (decided); else those of which one was.  since: a step at
    which all was well, if it may have been wrong for longer than this one.
    """

    what: str
    ranks: tuple[int, ...]
    decided: bool
    how: str
    since: int | None = None


class CorruptionError(UserError):
    """A device or memory has changed what was computed at a step."""

    exit_code = 3

    def __init__(self, message: str, step: int, finding: Finding) -> None:
        super().__init__(message)
        self.step, self.finding = step, finding


def is_witnessed(seed: int, step: int, share: float) -> bool:
    """Return whether a step is one of those that are computed again."""
    return bool(keyed_rng(seed, "witness", step).random() < share)


def distance(seed: int, step: int, ranks: int) -> int:
    """Return how far along the ring of data ranks the one is whose work a rank computes again at a step; 0: its own.

    It is the same for all, so that each is looked at once.
    """
    return int(keyed_rng(seed, "witness", step, "distance").integers(1, ranks)) if ranks > 1 else 0


def most_agree(votes: Sequence[T]) -> T | None:
    """Return what more votes say than anything else; None where two are said equally often."""
    (first, count), *others = Counter(votes).most_common(2)
    return None if others and others[0][1] == count else first


class Messages:
    """Compares what wires carried, and sums over ranks, within `followed`."""

    def __init__(self) -> None:
        self._carried: dict[Group, list[list[Tensor]]] = {}  # checksums of what was sent to each rank, and of it there
        self._computed: list[Tensor] = []  # of a sum, made twice

    def carried(self, group: Group, x: Tensor, out: Tensor, work: Work) -> Work:
        """Note checksums of the piece for each rank now, and of the piece from each when all have arrived."""
        one = x.numel() < out.numel()  # an all-gather: the same for each
        sums = [row_checksums(x.view(1 if one else group.size, -1)).expand(group.size)]
        self._carried.setdefault(group, []).append(sums)
        return _Followed(work.work, work.name, lambda: sums.append(row_checksums(out.view(group.size, -1))))

    def computed(self, result: Tensor, again: Tensor) -> None:
        self._computed.append(torch.cat([row_checksums(x.view(1, -1)) for x in (result, again)]))

    def wrong(self) -> tuple[list[tuple[int, int]], bool]:
        """Return which messages arrived changed, (from, to) of the world, and whether a sum was another the second
        time.  All ranks call this, no more within `followed`.
        """
        found = []
        for group, every in self._carried.items():
            sent = torch.stack([sums[0] for sums in every], 1).contiguous()
            claimed = torch.empty_like(sent)
            Wire(group).all_to_all(claimed.view(-1), sent.view(-1)).wait()
            arrived = torch.stack([sums[1] for sums in every], 1)
            senders = (claimed != arrived).any(1).nonzero().flatten().tolist()
            found += [(group.ranks[sender], group.ranks[group.rank]) for sender in senders]
        return found, any(bool(first != second) for first, second in self._computed)


@dataclass(frozen=True)
class _Followed(Work):
    arrived: Callable[[], object] = field(default=lambda: None)

    def wait(self) -> None:
        super().wait()
        self.arrived()


class Witness:
    """Computes again what the seed draws: call `begin`, `check_work` and `check_update` in each step, on all ranks.

    Errors: UserError where nothing could be compared; CorruptionError on all ranks when something is found.
    """

    def __init__(
        self,
        share: float,
        seed: int,
        team: Team,
        device: torch.device | str,
        checked: Checked,
        step: int,
        tell: Callable[[int, Finding, Sequence[Sequence[str]]], str],
    ) -> None:
        """share: of the steps.  step: how many are done.

        tell: called on all ranks with the step, what was found, and hosts and devices of its ranks, before the error is
        raised; it returns what the error says besides.
        """
        self.share, self.seed, self.team, self.checked, self.tell = share, seed, team, checked, tell
        self.drawn = False  # whether this step is
        self._tested, self._well = not share, step
        self._stack, self._messages, self._before = ExitStack(), Messages(), Sums()
        if not share:
            return
        device = torch.device(device)
        if device.type == "mps":
            raise UserError("train.witness: on an Apple GPU sums are made in no fixed order; leave it at 0")
        name = str(device)
        if device.type == "cuda":
            about = torch.cuda.get_device_properties(device)
            name = f"cuda:{torch.cuda.current_device() if device.index is None else device.index} {about.name}"
            name += f" {about.uuid}"
        shards = {kind: checked.parts(kind)[0] for kind in checked.checksums()}
        told = team.all_gather_object([[platform.node(), name], shards], "the witness")
        self.hosts: list[list[str]] = [host for host, _ in told]
        self._shards: list[dict[str, int]] = [of for _, of in told]
        if team.is_rank_zero:
            who = "another rank" if team.mesh.data.size > 1 else "the same rank, as there is no other"
            log.info("witness: %.3g %% of the steps are computed again, by %s", 100 * share, who)

    def begin(self, step: int) -> bool:
        """Begin a step; return whether it is drawn."""
        drawn, before = is_witnessed(self.seed, step, self.share), self.drawn
        if drawn or before:
            self.checked.witness(drawn)
        self.drawn = drawn
        if drawn:
            self._before, self._messages = self.checked.checksums(), Messages()
            self._stack.enter_context(followed(self._messages))
        return drawn

    def check_work(self, step: int, work: Batches, own: Callable[[], Sums], again: Again) -> None:
        """Compare when a step's examples have been collected, before their gradients are exchanged.

        work: this rank's.  own: returns checksums of what it computed.  again: computes a rank's work once more, and
        changes nothing; ranks that share an example call it together.
        Errors: UserError where a first trial shows that bits are not repeated here; CorruptionError.
        """
        if not (self.drawn or not self._tested):
            return
        works = self.team.of_example_leaders(self.team.all_gather_object(work, f"the work of step {step}"))
        if not self._tested:
            self._test(works[0][:1], again)
        if not self.drawn:
            return
        data, most = self.team.mesh.data, self.team.mesh.model.size
        far = distance(self.seed, step, data.size)
        found, other = own(), again(works[(data.rank + far) % data.size])
        after = self.checked.checksums()
        compared = self._before, after, found, other
        before, now, mine, others = (self._of_all(sums, f"the witness of step {step}") for sums in compared)
        for kind in after:
            if changed := [rank for rank in self._ranks if before[rank][kind] != now[rank][kind]]:
                where = self._where(kind, [self._before[kind], after[kind]] if self._rank == changed[0] else [])
                how = "during a step, while nothing wrote there"
                self._raise(step, Finding(f"{kind} changed{where}", (*changed,), True, how))
        for kind in after:
            self._check_replicas(step, kind, [of[kind] for of in now], after[kind])
        self._well = step
        for d in range(data.size):
            w = (d - far) % data.size
            pairs = zip(mine[d * most : (d + 1) * most], others[w * most : (w + 1) * most])
            if wrong := [kind for a, b in pairs for kind in a if a[kind] != b[kind]]:
                self._judge(step, d, w, wrong[0], (mine, others), (found, other), again(works[d]))

    def check_update(self, step: int) -> None:
        """Compare at the end of a step.  Errors: CorruptionError."""
        if not self.drawn:
            return
        self._stack.close()
        (links, sums), (first, second) = self._messages.wrong(), self.checked.updates
        kinds = [kind for kind in first if not torch.equal(first[kind], second[kind])]
        every = self.team.all_gather_object([links, sums, kinds], f"the messages of step {step}")
        changed = [link for there in every for link in there[0]]
        if changed:
            said = ", ".join(f"from rank {a} to rank {b}" for a, b in changed[:3])
            both = set.intersection(*(set(link) for link in changed))
            decided = len(both) == 1 and len(changed) > 1
            ranks = both if decided else {rank for link in changed for rank in link}
            self._raise(step, Finding("a message changed on its way", (*sorted(ranks),), decided, said))
        if wrong := [rank for rank in self._ranks if every[rank][1]]:
            how = "made twice from the same numbers"
            self._raise(step, Finding("a sum over ranks is not what it is the second time", (*wrong,), True, how))
        if wrong := [rank for rank in self._ranks if every[rank][2]]:
            kind = every[wrong[0]][2][0]
            where = self._where(kind, [first[kind], second[kind]] if self._rank == wrong[0] else [])
            how = "made twice from the same gradient"
            self._raise(
                step, Finding(f"the update of {kind} is not what it is the second time{where}", (*wrong,), True, how)
            )

    # Ranks are those of the world

    @property
    def _rank(self) -> int:
        return self.team.mesh.world.rank

    @property
    def _ranks(self) -> range:
        return range(self.team.mesh.world.size)

    def _of_all(self, sums: Sums, what: str) -> list[dict[str, int]]:
        """Return every rank's checksums, each kind's as one number."""
        own = torch.cat([row_checksums(x[None]) for x in sums.values()]).cpu()
        return [dict(zip(sums, row)) for row in self.team.all_gather(own, what).wait().tolist()]

    def _where(self, kind: str, own: Sequence[Tensor]) -> str:
        """Say in which parameters two checksums of a kind differ, which one rank, or two, have; the others give none.

        All ranks call this.
        """
        table = [self.checked.parts(kind)[1], [x.tolist() for x in own]] if own and kind != "loss" else None
        every = [told for told in self.team.all_gather_object(table, "what differs") if told is not None]
        if not every:
            return ""
        names, (one, other) = every[0][0], [sums for _, tables in every for sums in tables]
        differing = list(dict.fromkeys(name for name, a, b in zip(names, one, other) if a != b))
        return f", in {listed(differing, 3)}" if differing else ""

    def _check_replicas(self, step: int, kind: str, sums: Sequence[int], own: Tensor) -> None:
        """Compare a kind of the state over the ranks that hold the same; most of them are right.

        sums: of all ranks.  own: this one's.
        """
        for shard in sorted({of[kind] for of in self._shards}):
            holders = [rank for rank in self._ranks if self._shards[rank][kind] == shard]
            if len({sums[rank] for rank in holders}) == 1:
                continue
            right = most_agree([sums[rank] for rank in holders])
            wrong = [rank for rank in holders if sums[rank] != right]
            one = next(rank for rank in holders if sums[rank] != sums[wrong[0]])
            where = self._where(kind, [own] if self._rank in (wrong[0], one) else [])
            how = "no majority" if right is None else f"{len(holders) - len(wrong)} of {len(holders)} agree"
            what = f"{kind} differ between ranks that hold the same{where}"
            self._raise(step, Finding(what, (*wrong,), right is not None, how, self._well))

    def _judge(
        self,
        step: int,
        d: int,
        w: int,
        kind: str,
        tables: tuple[list[dict[str, int]], list[dict[str, int]]],
        own: tuple[Sums, Sums],
        again: Sums,
    ) -> None:
        """Say who was wrong about the work of data rank d, which w computed again: all have computed it once more.

        tables: what all have of their own work, and of that which they computed again.  own: this rank's.
        """
        most, data = self.team.mesh.model.size, self.team.mesh.data

        def vote(table: list[dict[str, int]], rank: int) -> tuple[int, ...]:
            return tuple(x for of in table[rank * most : (rank + 1) * most] for x in of.values())

        shown = [own[0][kind]] if self._rank == d * most else []
        where = self._where(kind, shown + ([own[1][kind]] if self._rank == w * most else []))
        fresh = self._of_all(again, f"the witness of step {step}, once more")
        voters = [d, w, *range(data.size)]
        votes = [vote(tables[0], d), vote(tables[1], w), *(vote(fresh, rank) for rank in range(data.size))]
        right = most_agree(votes)
        wrong = {d, w} if right is None else {voter for voter, said in zip(voters, votes) if said != right}
        ranks = [rank * most + m for rank in sorted(wrong) for m in range(most)]
        how = "no majority" if right is None else f"{votes.count(right)} of {len(votes)} computations agree"
        what = f"the {kind} of rank {d * most}'s examples is not what it is when computed again{where}"
        self._raise(step, Finding(what, (*ranks,), len(ranks) == 1 or (right is not None and most == 1), how))

    def _test(self, work: Batches, again: Again) -> None:
        """Compute one batch twice on each rank, and refuse to go on where bits differ that should not."""
        self._tested = True
        first, second = (self._of_all(again(work), "the witness's trial") for _ in range(2))
        says = f"train.witness = {self.share:g}"
        if differ := [rank for rank in self._ranks if first[rank] != second[rank]]:
            raise UserError(
                f"{says}: {self._named(differ)} computed an example twice, with different bits: it does not repeat its "
                "work (or computes wrongly: warpfold doctor --kernels), so nothing can be compared; leave it at 0"
            )
        size = self.team.mesh.model.size
        if differ := [rank for rank in self._ranks if first[rank] != first[rank % size]]:
            raise UserError(
                f"{says}: {self._named(differ)} and {self._named([differ[0] % size])} compute different bits from the "
                "same example: they are not of one kind, or one computes wrongly (warpfold doctor --kernels), so "
                "nothing can be compared; train on devices and software of one kind, or leave it at 0"
            )

    def _named(self, ranks: Iterable[int]) -> str:
        return listed([f"rank {rank} (host {self.hosts[rank][0]}, {self.hosts[rank][1]})" for rank in ranks], 4)

    def _raise(self, step: int, finding: Finding) -> None:
        who = self._named(finding.ranks)
        who = f"{who} is wrong" if finding.decided else f"undecided which is wrong of {who}"
        said = f"step {step}: {finding.what} ({finding.how}): {who}"
        more = self.tell(step, finding, [self.hosts[rank] for rank in finding.ranks])
        raise CorruptionError(f"{said}; {more}", step, finding)
