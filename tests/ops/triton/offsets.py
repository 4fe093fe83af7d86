"""Detect overflows in a kernel's index arithmetic by intervals of all integers that lead to a pointer or a mask.

Tensors with more than 2^31 elements are too large for most machines, so launchers get meta tensors (`launch.recorded`),
and the computation is followed through Triton's representation (TTIR), starting with the values of the arguments and
the grid.  A product of two 32-bit integers that exceeds 2^31 is found even if it is widened afterwards.  The analysis
is sound but not exact: values without a bound count as overflows.
"""

import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

from tests.ops.triton.budgets import SM_80, ttir
from tests.ops.triton.ttir import Operation, SourceLines, arguments, parse
from warpfold.ops.triton.compile import source
from warpfold.ops.triton.launch import KernelLaunch

GRID = (2**31 - 1, 65535, 65535)  # CUDA's limits

Interval = tuple[int, int]  # both ends inclusive
WIDTHS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "index": 64}
SAME = (  # operations that preserve or move values
    *("tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans", "tt.unsplat"),
    *("arith.extsi", "arith.trunci", "arith.index_cast"),
)


@dataclass(frozen=True)
class Overflow:
    """An integer that may overflow: source location, operation, and interval."""

    where: str
    operation: str
    interval: Interval | None  # None: unbounded

    def __str__(self) -> str:
        size = f"reaches {max(self.interval, key=abs):,}" if self.interval else "cannot be bounded"
        return f"{self.where}: {self.operation} {size}"


def overflows(launch: KernelLaunch) -> list[Overflow]:
    """List the possible overflows of a launch in source order, including a grid that exceeds the limits."""
    text = ttir(launch)
    values = _Values(text, launch)
    for op in values.ops:
        if op.name == "tt.addptr":
            if values.of(op.operands[1]) is None:
                values.overflows.append(Overflow(values.lines.of(op), "offset", None))
        elif op.name in ("arith.cmpi", "scf.for", "tt.make_tensor_ptr", "tt.advance") or "descriptor" in op.name:
            for operand in op.operands:
                values.of(operand)
    found = {str(o): o for o in values.overflows}
    for axis, (programs, most) in enumerate(zip(launch.grid, GRID)):
        if programs > most:
            where = f"{launch.kernel.name}: grid axis {axis}"
            found[where] = Overflow(where, "count of programs", (0, programs))
    return sorted(found.values(), key=lambda o: (o.where, o.operation))


def _constant(text: str) -> Interval | None:
    if match := re.search(r"arith\.constant (true|false)", text):
        return (int(match[1] == "true"),) * 2
    match = re.search(r"arith\.constant (?:\{.*\} )?(?:dense<)?(-?\d+)>? : \S*(?:i\d+|index)>?$", text)
    return (int(match[1]),) * 2 if match else None


def _arguments(text: str, launch: KernelLaunch) -> dict[str, Interval | None]:
    """Return the intervals of the kernel's arguments by their names in the text, which have the same order."""
    specialised, _ = source(launch, SM_80)
    values = [v for name, kind in specialised.signature.items() for v in _leaves(kind, launch.arguments.get(name))]
    return {n: (v, v) if isinstance(v, int) else None for n, v in zip(arguments(text), values, strict=True)}


def _leaves(kind: Any, value: Any) -> list[Any]:
    """Yield the values of an argument at run time: everything that is not constant, and all members of tuples."""
    if isinstance(kind, tuple):
        return [leaf for k, v in zip(kind, value, strict=True) for leaf in _leaves(k, v)]
    return [] if kind == "constexpr" else [int(value) if isinstance(value, bool) else value]


class _Values:
    """The intervals of a kernel's integers; `overflows`: possible overflows among those that were looked up."""

    def __init__(self, text: str, launch: KernelLaunch) -> None:
        self.launch = launch
        self.lines = SourceLines(text)
        self.ops = parse(text)
        self.made = {result: op for op in self.ops for result in op.results}
        self.arguments = _arguments(text, launch)
        self.known: dict[str, Interval | None] = {}
        self.overflows: list[Overflow] = []

    def of(self, name: str) -> Interval | None:
        """Return the interval of an integer, or None if it is unbounded or no integer."""
        if name not in self.known:
            self.known[name] = None  # for values that depend on themselves
            self.known[name] = self._work_out(name)
        return self.known[name]

    def _work_out(self, name: str) -> Interval | None:
        if name in self.arguments:
            return self.arguments[name]
        op = self.made.get(name)
        if op is None:
            return None
        if op.name == "scf.for":
            return self._of_loop(op, name)
        if op.name == "scf.if":
            at = op.results.index(name)
            return _join(*(self.of(end[at]) for end in op.yields)) if len(op.yields) == 2 else None
        return self._fit(op, self._exact(op))

    def _fit(self, op: Operation, exact: Interval | None) -> Interval | None:
        """Clamp a result to its number of bits, and record an overflow."""
        if op.name not in CHECKED:
            return exact
        width = WIDTHS[op.type]
        limit = 2 ** (width - 1)
        if exact is None or exact[0] < -limit or exact[1] >= limit:
            what = f"{width}-bit {CHECKED[op.name]}"
            self.overflows.append(Overflow(self.lines.of(op), what, exact))
            return -limit, limit - 1
        return exact

    def _exact(self, op: Operation) -> Interval | None:
        """Compute the interval of an operation on integers of unlimited size."""
        if op.name == "tt.get_program_id":
            axis = "xyz".index(op.text.split("tt.get_program_id ")[1][0])
            return 0, (*self.launch.grid, 1, 1)[axis] - 1
        if op.name == "tt.get_num_programs":
            axis = "xyz".index(op.text.split("tt.get_num_programs ")[1][0])
            return ((*self.launch.grid, 1, 1)[axis],) * 2
        if op.name == "tt.make_range":
            start, end = (int(re.findall(rf"\b{word} = (-?\d+)", op.text)[0]) for word in ("start", "end"))
            return start, end - 1
        if op.name == "arith.constant":
            return _constant(op.text)
        if op.name in SAME:
            return self.of(op.operands[0])
        if op.name == "tt.reduce":
            combined = {inner.name for inner in op.inner}
            return self.of(op.operands[0]) if combined <= {"arith.minsi", "arith.maxsi", "tt.reduce.return"} else None
        given = [self.of(operand) for operand in op.operands]
        if op.name == "arith.extui":
            return (0, 1) if " : i1 " in op.text or "xi1>" in op.text else _nonnegative(given[0])
        if op.name == "arith.select":
            return _join(*given[1:])
        rule = RULES.get(op.name)
        return rule(given[0], given[1]) if rule and len(given) == 2 and None not in given else None  # type: ignore[arg-type]

    def _of_loop(self, loop: Operation, name: str) -> Interval | None:
        """Compute the interval of a loop's counter, or of a carried value to which iterations add a bounded number."""
        lower, upper, step, *first = loop.operands
        low, high, by = self.of(lower), self.of(upper), self.of(step)
        if low is None or high is None or by is None or by[0] <= 0:
            return None
        at = loop.results.index(name)
        if at == 0:
            return low[0], max(low[0], high[1] - 1)
        carried = (at - 1) % len(first)
        turns = max(0, -(-(high[1] - low[0]) // by[0]))
        start, inside, end = self.of(first[carried]), loop.results[1 + carried], loop.yields[-1][carried]
        if start is None or end == inside:
            return start
        return self._kept(inside, end, start) or self._summed(inside, end, start, turns)

    def _kept(self, inside: str, end: str, start: Interval) -> Interval | None:
        """Find an interval that an iteration does not leave, for a carried value; None if two iterations find none."""
        interval = start
        for _ in range(2):
            trial = copy(self)
            # Forget unfinished values, because they may depend on `inside`, which is an assumption here.
            trial.known = {n: i for n, i in self.known.items() if i is not None}
            trial.known[inside] = interval
            trial.overflows = []
            new = _join(interval, trial.of(end))
            if new == interval:
                return interval if not trial.overflows else None
            if new is None:
                return None
            interval = new
        return None

    def _summed(self, inside: str, end: str, start: Interval, turns: int) -> Interval | None:
        """Compute the interval of a carried value to which an iteration adds a bounded number."""
        made = self.made.get(end)
        if made is None or made.name != "arith.addi" or made.operands.count(inside) != 1:
            return None
        added = self.of(next(o for o in made.operands if o != inside))
        if added is None:
            return None
        return self._fit(made, (start[0] + min(0, turns * added[0]), start[1] + max(0, turns * added[1])))


def _join(*intervals: Interval | None) -> Interval | None:
    known = [i for i in intervals if i is not None]
    return (min(i[0] for i in known), max(i[1] for i in known)) if len(known) == len(intervals) and known else None


def _nonnegative(a: Interval | None) -> Interval | None:
    return a if a is not None and a[0] >= 0 else None


def _corners(a: Interval, b: Interval) -> Interval:
    products = [x * y for x in a for y in b]
    return min(products), max(products)


def _divide(a: Interval, b: Interval) -> Interval | None:
    if b[0] <= 0:
        return None
    quotients = [abs(x) // y * (1 if x >= 0 else -1) for x in a for y in b]
    return min(quotients), max(quotients)


def _remainder(a: Interval, b: Interval) -> Interval | None:
    if b[0] <= 0:
        return None
    most = b[1] - 1
    return max(-most, min(0, a[0])), min(most, max(0, a[1]))


RULES: Mapping[str, Callable[[Interval, Interval], Interval | None]] = {
    "arith.addi": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "arith.subi": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "arith.muli": _corners,
    "arith.divsi": _divide,
    "arith.remsi": _remainder,
    "arith.divui": lambda a, b: _divide(a, b) if a[0] >= 0 else None,
    "arith.remui": lambda a, b: _remainder(a, b) if a[0] >= 0 else None,
    "arith.minsi": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "arith.maxsi": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "arith.shli": lambda a, b: _corners(a, (2 ** b[0], 2 ** b[1])) if b[0] >= 0 and b[1] < 64 else None,
    "arith.shrsi": lambda a, b: (
        (min(a[0] >> b[0], a[0] >> b[1]), max(a[1] >> b[0], a[1] >> b[1])) if b[0] >= 0 else None
    ),
}
CHECKED = {
    "arith.addi": "sum",
    "arith.subi": "difference",
    "arith.muli": "product",
    "arith.shli": "shift",
    "arith.trunci": "narrowing",
}
