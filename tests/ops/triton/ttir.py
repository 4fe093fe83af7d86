"""Parser of Triton's representation of a kernel (TTIR): operations, their values, and source locations."""

import re
from dataclasses import dataclass, field
from pathlib import Path

NAME = r"%[\w$.-]+(?:#\d+)?"


@dataclass
class Operation:
    """An operation.

    results: the names of its results; for a loop its counter, the carried values inside the loop, and those after it.
    operands: the names of its operands; for a loop its bounds, its step, and the initial carried values.
    type: the element type of the first result.
    Names are those of the text made unique, because the text reuses them after a closing brace.
    """

    name: str
    results: list[str]
    operands: list[str]
    text: str
    type: str = ""
    place: str = ""  # name in the text
    yields: list[list[str]] = field(default_factory=list)  # results of its regions
    inner: list["Operation"] = field(default_factory=list)  # operations directly inside


class _Reader:
    """Reads a text once from start to end."""

    def __init__(self) -> None:
        self.ops: list[Operation] = []
        self.within: list[Operation] = []  # with open braces
        self.scopes: list[dict[str, str]] = [{}]  # text names -> unique names
        self.taken: set[str] = set()

    def read(self, text: str) -> list[Operation]:
        for line in text.splitlines():
            match = re.fullmatch(r"\s*(.*?)\s*(?:loc\(#(loc\d*)\))?", line)
            assert match is not None
            self._line(match[1], match[2] or "")
        return self.ops

    def _line(self, line: str, place: str) -> None:
        if line.startswith("}"):
            self.scopes.pop()
            closed = self.within.pop()
            if line.endswith("{"):  # else branch
                self._open(closed)
        elif line.startswith("^"):
            for name in re.findall(rf"({NAME}): ", line):
                self._define(name)
        elif match := re.match(rf"(?:({NAME})(?::(\d+))? = )?\"?([a-z_]+\.[\w.]+)\"?", line):
            self._operation(match, line, place)
        elif line.endswith("{"):
            self._open(Operation("", [], [], line))

    def _operation(self, match: re.Match[str], line: str, place: str) -> None:
        name, rest = match[3], line[match.end() :]
        typed = re.search(r"(?:[ x<])(index|i\d+)>?$", line)
        printed = [f"{match[1]}#{i}" for i in range(int(match[2]))] if match[2] else [match[1]] if match[1] else []
        inside: list[str] = []
        if name == "scf.for":
            carried = re.search(r"iter_args\((.*?)\)", rest)
            counter, *bounds = re.findall(NAME, rest)[:4]
            inside = [counter, *(re.findall(rf"({NAME}) =", carried[1]) if carried else [])]
            used = [*bounds, *(re.findall(rf"= ({NAME})", carried[1]) if carried else [])]
        else:
            used = re.findall(NAME, rest.split(" : ")[0])
        operands = [self._known(n) for n in used]
        results = [self._define(n) for n in printed]
        op = Operation(name, results, operands, line, typed[1] if typed else "", place)
        if name == "scf.yield":
            self.within[-1].yields.append(operands)
        if self.within:
            self.within[-1].inner.append(op)
        self.ops.append(op)
        if line.endswith("{"):
            self._open(op)
            op.results = [*(self._define(n) for n in inside), *results]

    def _open(self, op: Operation) -> None:
        self.within.append(op)
        self.scopes.append({})

    def _define(self, name: str) -> str:
        unique = name if name not in self.taken else f"{name}'{len(self.taken)}"
        self.taken.add(unique)
        self.scopes[-1][name] = unique
        return unique

    def _known(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), name)


def parse(text: str) -> list[Operation]:
    """Return all operations in order.  Raises ValueError for calls and while loops, which are not supported."""
    if found := re.search(r"\b(tt\.call|scf\.while|cf\.\w+)\b", text):
        raise ValueError(f"{found[1]} is not followed")
    return _Reader().read(text)


def arguments(text: str) -> list[str]:
    """Parse the names of the kernel's arguments, in order."""
    return re.findall(rf"({NAME}): ", next(line for line in text.splitlines() if "tt.func public" in line))


class SourceLines:
    """The source lines of operations."""

    def __init__(self, text: str) -> None:
        self.known = dict(re.findall(r"^#(loc\d*) = loc\((.*)\)$", text, re.MULTILINE))

    def of(self, op: Operation) -> str:
        """Return "norm.py:61"; for inlined code, the location in the inlined function."""
        place = op.place
        for _ in range(20):
            if found := re.search(r'"([^"]*\.py)":(\d+)', self.known.get(place, "")):
                return f"{Path(found[1]).name}:{found[2]}"
            inner = re.search(r"#(loc\d*)", self.known.get(place, ""))
            if inner is None:
                break
            place = inner[1]
        return "unknown place"
