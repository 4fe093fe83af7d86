"""The report of `accelerate`, as data and as a table."""

import shutil
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# Smallest and largest width of a table, in characters.
WIDTH = (80, 120)
# Smallest widths of the columns of names, classes and operations.
MIN_COLUMNS = (9, 12, 10)
NO_OPERATION = "no operation of ours"


@dataclass(frozen=True)
class LayerSpeed:
    """The speed of a layer relative to its own code on the current device, from medians.

    forward: the time of its own code divided by ours, without gradients. both: the same for forward and backward pass;
    None: the layer has no gradient. memory: our peak of both passes divided by its own code's; None: not measured.
    """

    forward: float
    both: float | None
    memory: float | None

    def __str__(self) -> str:
        """Format as "forward 1.70x faster, forward and backward together 1.25x slower, with 0.40 of the memory"."""
        text = f"forward {faster_or_slower(self.forward)}"
        text += "" if self.both is None else f", forward and backward together {faster_or_slower(self.both)}"
        return text + ("" if self.memory is None else f", with {self.memory:.2f} of the memory")


def faster_or_slower(ratio: float) -> str:
    """Format a speed ratio with its direction: "1.70x faster" or "1.25x slower"."""
    return f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / max(ratio, 1e-3):.2f}x slower"


@dataclass(frozen=True)
class LayerKind:
    """Modules of a model with the same class and the same parameter shapes.

    names: of the modules. operation: ours that computes them now; "" if they were left. why: the reason why they were
    left. difference: the largest relative difference in the comparison; None: not compared. speed: None: not measured.
    parameters: the number of parameters in all of these modules.
    """

    names: tuple[str, ...]
    class_name: str
    operation: str = ""
    why: str = ""
    difference: float | None = None
    speed: LayerSpeed | None = None
    parameters: int = 0


@dataclass(frozen=True)
class Acceleration:
    """The report of `accelerate`. Printing it shows a table.

    parameters: the number of parameters of the whole model. notes: remarks below the table.
    """

    kinds: tuple[LayerKind, ...]
    parameters: int = 0
    notes: tuple[str, ...] = ()

    @property
    def swapped(self) -> tuple[LayerKind, ...]:
        """The kinds of layers that compute with our operations."""
        return tuple(kind for kind in self.kinds if kind.operation)

    @property
    def left(self) -> tuple[LayerKind, ...]:
        """The kinds that were left: supported ones, and unsupported ones with parameters."""
        return tuple(kind for kind in self.kinds if not kind.operation)

    def __str__(self) -> str:
        """Format the table, with the width of the terminal within limits."""
        width = min(max(shutil.get_terminal_size((100, 24)).columns, WIDTH[0]), WIDTH[1])
        lines = _swapped_lines(self.swapped, width)
        left: dict[tuple[str, str], list[str]] = {}
        for kind in self.left:
            if kind.why != NO_OPERATION:
                left.setdefault((kind.why, kind.class_name), []).extend(kind.names)
        for (reason, name), names in left.items():
            named_layers = f"{len(names)} {name} ({pattern(tuple(names))})"
            lines += textwrap.wrap(f"left: {named_layers}: {reason}", width, subsequent_indent="  ")
        unsupported = Counter[str]()
        for kind in self.left:
            unsupported[kind.class_name] += len(kind.names) if kind.why == NO_OPERATION else 0
        if counts := ", ".join(f"{count} {name}" for name, count in (+unsupported).most_common()):
            lines += textwrap.wrap(f"left, {NO_OPERATION}: {counts}", width, subsequent_indent="  ")
        if self.parameters:
            share = sum(kind.parameters for kind in self.swapped) / self.parameters
            lines.append(f"{share:.0%} of {self.parameters:,} parameters are in layers that were swapped")
        return "\n".join([*lines, *(line for note in self.notes for line in textwrap.wrap(note, width))])


def _swapped_lines(kinds: Sequence[LayerKind], width: int) -> list[str]:
    """Format a row for each swapped kind of layer. Names are shortened if the table would be too wide."""
    if not kinds:
        return []
    merged: dict[tuple[str, str, LayerSpeed | None], list[LayerKind]] = {}
    for kind in kinds:
        merged.setdefault((kind.class_name, kind.operation, kind.speed), []).append(kind)
    rows: list[tuple[str, ...]] = [("swapped", "class", "computed by", "differs", "forward", "and backward", "memory")]
    for (class_name, operation, speed), group in merged.items():
        names = tuple(name for kind in group for name in kind.names)
        differences = [kind.difference for kind in group if kind.difference is not None]
        worst = f"{max(differences):.0e}" if differences else ""
        figures = ("", "", "")
        if speed is not None:
            both = "" if speed.both is None else faster_or_slower(speed.both)
            figures = faster_or_slower(speed.forward), both, "" if speed.memory is None else f"{speed.memory:.2f}"
        rows.append((pattern(names), f"{len(names)} {class_name}", operation, worst, *figures))
    columns = [column for column in zip(*rows) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    for i, min_width in enumerate(MIN_COLUMNS):
        spare = width - sum(widths) - 2 * (len(widths) - 1)
        widths[i] = max(widths[i] + min(spare, 0), min(widths[i], min_width))
    return [
        "  ".join(_cut(cell, size).ljust(size) for cell, size in zip(row, widths)).rstrip() for row in zip(*columns)
    ]


def _cut(text: str, size: int) -> str:
    """Shorten a text to `size` characters by cutting its middle."""
    if len(text) <= size:
        return text
    return text[: (size - 3) // 2] + "..." + text[len(text) - (size - 3 - (size - 3) // 2) :]


def pattern(names: Sequence[str]) -> str:
    """Merge names of modules to one pattern, with stars for differing components."""
    split = [name.split(".") for name in names]
    if len({len(components) for components in split}) > 1:
        return f"{names[0]}, ..."
    return ".".join(values[0] if len(set(values)) == 1 else "*" for values in zip(*split)) or "(the model)"
