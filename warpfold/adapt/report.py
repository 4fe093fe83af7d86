"""What `accelerate` did to a model, as data and as a table."""

import shutil
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = (80, 120)  # columns of a table, at least and at most
LEAST = (9, 12, 10)  # columns of a name, of a class and of an operation
NO_OPERATION = "no operation of ours"


@dataclass(frozen=True)
class LayerSpeed:
    """How often faster than its own code a layer is on the device at hand, and its share of the memory; medians."""

    forward: float  # the time of its own code / that of ours, without gradients
    both: float | None  # of forward and backward pass; None: it has no gradient
    memory: float | None  # the peak of both passes / that of its own code; None: not measured

    def __str__(self) -> str:
        """ "forward 1.70x faster, forward and backward together 1.25x slower, with 0.40 of the memory"."""
        said = f"forward {faster_or_slower(self.forward)}"
        said += "" if self.both is None else f", forward and backward together {faster_or_slower(self.both)}"
        return said + ("" if self.memory is None else f", with {self.memory:.2f} of the memory")


def faster_or_slower(ratio: float) -> str:
    """Say how often faster a layer is than its own code, so that the direction cannot be misread."""
    return f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / max(ratio, 1e-3):.2f}x slower"


@dataclass(frozen=True)
class LayerKind:
    """Modules of a model that are alike: of one class, with parameters of the same shapes."""

    names: tuple[str, ...]  # of the modules
    of_class: str
    operation: str = ""  # what computes them now; nothing: they were left
    why: str = ""  # they were left
    difference: float | None = None  # the greatest that was found between both ways, relative; None: not compared
    speed: LayerSpeed | None = None  # None: not measured
    parameters: int = 0  # numbers in all of these modules


@dataclass(frozen=True)
class Acceleration:
    """What `accelerate` did to a model: print it."""

    kinds: tuple[LayerKind, ...]
    parameters: int = 0  # numbers in all of the model
    notes: tuple[str, ...] = ()  # what else there is to say

    @property
    def swapped(self) -> tuple[LayerKind, ...]:
        """The kinds of layers that compute by our operations."""
        return tuple(kind for kind in self.kinds if kind.operation)

    @property
    def left(self) -> tuple[LayerKind, ...]:
        """The kinds that are known and were left, and those that have parameters and are not known."""
        return tuple(kind for kind in self.kinds if not kind.operation)

    def __str__(self) -> str:
        """Return the table, as wide as the terminal is, within limits."""
        width = min(max(shutil.get_terminal_size((100, 24)).columns, WIDTH[0]), WIDTH[1])
        lines = _swapped_lines(self.swapped, width)
        known = [kind for kind in self.left if kind.why != NO_OPERATION]
        for why, names in _by_reason(known):
            lines += textwrap.wrap(f"left: {names}: {why}", width, subsequent_indent="  ")
        unknown = Counter[str]()
        for kind in self.left:
            unknown[kind.of_class] += len(kind.names) if kind.why == NO_OPERATION else 0
        if named := ", ".join(f"{count} {name}" for name, count in (+unknown).most_common()):
            lines += textwrap.wrap(f"left, {NO_OPERATION}: {named}", width, subsequent_indent="  ")
        if self.parameters:
            share = sum(kind.parameters for kind in self.swapped) / self.parameters
            lines.append(f"{share:.0%} of {self.parameters:,} parameters are in layers that were swapped")
        return "\n".join([*lines, *(line for note in self.notes for line in textwrap.wrap(note, width))])


def _swapped_lines(kinds: Sequence[LayerKind], width: int) -> list[str]:
    """Return a row for each kind of layer that was swapped; names are cut where the table would be too wide."""
    if not kinds:
        return []
    merged: dict[tuple[str, str, LayerSpeed | None], list[LayerKind]] = {}
    for kind in kinds:
        merged.setdefault((kind.of_class, kind.operation, kind.speed), []).append(kind)
    rows: list[tuple[str, ...]] = [("swapped", "class", "computed by", "differs", "forward", "and backward", "memory")]
    for (of_class, operation, speed), alike in merged.items():
        names = tuple(name for kind in alike for name in kind.names)
        found = [kind.difference for kind in alike if kind.difference is not None]
        worst = f"{max(found):.0e}" if found else ""
        rows.append((pattern(names), f"{len(names)} {of_class}", operation, worst, *_figures(speed)))
    columns = [column for column in zip(*rows) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    for i, least in enumerate(LEAST):
        spare = width - sum(widths) - 2 * (len(widths) - 1)
        widths[i] = max(widths[i] + min(spare, 0), min(widths[i], least))
    return [
        "  ".join(_cut(cell, size).ljust(size) for cell, size in zip(row, widths)).rstrip() for row in zip(*columns)
    ]


def _figures(speed: LayerSpeed | None) -> tuple[str, str, str]:
    if speed is None:
        return "", "", ""
    both = "" if speed.both is None else faster_or_slower(speed.both)
    return faster_or_slower(speed.forward), both, "" if speed.memory is None else f"{speed.memory:.2f}"


def _by_reason(kinds: Sequence[LayerKind]) -> list[tuple[str, str]]:
    """Return each reason why layers were left, and which."""
    found: dict[tuple[str, str], list[str]] = {}
    for kind in kinds:
        found.setdefault((kind.why, kind.of_class), []).extend(kind.names)
    return [(why, f"{len(names)} {of} ({pattern(tuple(names))})") for (why, of), names in found.items()]


def _cut(text: str, size: int) -> str:
    """Return a text of so many characters at most, without its middle if need be."""
    if len(text) <= size:
        return text
    return text[: (size - 3) // 2] + "..." + text[len(text) - (size - 3 - (size - 3) // 2) :]


def pattern(names: Sequence[str]) -> str:
    """Return names of modules as one pattern: what differs is a star."""
    split = [name.split(".") for name in names]
    if len({len(parts) for parts in split}) > 1:
        return f"{names[0]}, ..."
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in zip(*split)) or "(the model)"
