"""Which predictions of a run keep their structures: the best by a score, or those that fulfil an expression.

An expression is read with Python's `ast` into comparisons, `and`, `or`, `not`; nothing in it is ever run.
"""

import ast
import operator
import re
from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from warpfold.errors import UserError

# Scores that a table has of a prediction, and whether more is better.
MORE_IS_BETTER = {
    "mean_plddt": True,
    "ptm": True,
    "iptm": True,
    "ranking_confidence": True,
    "pair_iptm": True,
    "ipsae": True,
    "ipsae_ab": True,
    "ipsae_ba": True,
    "ipsae15": True,
    "pdockq": True,
    "pdockq2": True,
    "lis": True,
    "pae_interaction": False,
    "interface_pae": False,
    "interface_plddt": True,
    "binder_plddt": True,
    "contacts": True,
    "clashes": False,
    "rmsd": False,
    "binder_rmsd": False,
    "target_rmsd": False,
}
OF_ERRORS = (
    *("ptm", "iptm", "pair_iptm", "ipsae", "ipsae_ab", "ipsae_ba", "ipsae15"),
    *("pdockq2", "lis", "pae_interaction", "interface_pae"),
)
OF_GIVEN = ("rmsd", "binder_rmsd", "target_rmsd")
OF_COMPLEXES = [name for name in MORE_IS_BETTER if name not in (*OF_GIVEN, "mean_plddt", "ptm", "ranking_confidence")]
NUMBERS = (*MORE_IS_BETTER, "length", "seed")
LONGEST = 1000  # letters of an expression
_COUNT = re.compile(r"0*[1-9][0-9]{0,8}")

COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
Row = Mapping[str, Any]
Condition = Callable[[Row], bool | None]  # None: it depends on what is not known of a row


@dataclass(frozen=True)
class Selection:
    """What keeps its structure: of all predictions the `best` by a score, or what fulfils the expression `text`.

    score: None for the default, which depends on what is predicted.
    """

    text: str
    best: int | None = None
    score: str | None = None

    @property
    def scores(self) -> list[str]:
        """Return the columns that decide."""
        if self.best is not None:
            return [] if self.score is None else [self.score]
        return [node.id for node in ast.walk(ast.parse(self.text, mode="eval")) if isinstance(node, ast.Name)]

    def order(self, row: Row) -> tuple[Any, ...]:
        """Return a key by which rows are sorted, best first; those without the score come last."""
        assert self.score is not None
        value = row[self.score]
        sign = -1 if MORE_IS_BETTER[self.score] else 1
        return value is None, 0 if value is None else sign * value, row["name"], row["model"] or "", row["seed"]

    def chosen(self, rows: Iterable[Row]) -> set[int]:
        """Return which rows of a run are kept, as their places."""
        every = list(rows)
        if self.best is None:
            condition = _condition(self.text)
            return {place for place, row in enumerate(every) if condition(row)}
        return set(sorted(range(len(every)), key=lambda place: self.order(every[place]))[: self.best])


def keep_of(given: Any) -> int | Selection | None:
    """Return what --keep means: a number of each query's predictions, or a selection among all.

    Errors: UserError for anything else; an unknown column is named, with those that there are.
    """
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given > 0):
        return given
    text = " ".join(given.split()) if isinstance(given, str) else ""
    if _COUNT.fullmatch(text):
        return int(text)
    what = f"--keep {given}"
    if text.startswith("best:") or not text:
        number, _, score = text.removeprefix("best:").partition(":")
        if not _COUNT.fullmatch(number) or (score == "" and text.endswith(":")):
            raise UserError(f'{what}: write a number, best:100, best:100:ipsae, or "ipsae > 0.6 and rmsd < 2"')
        if score and score not in MORE_IS_BETTER:
            raise UserError(f"{what}: there is no score {score}; there are {', '.join(MORE_IS_BETTER)}")
        return Selection(text, int(number), score or None)
    _condition(text)
    return Selection(text)


def _condition(text: str) -> Condition:
    """Read an expression.  Errors: UserError for what is none."""
    try:
        if len(text) > LONGEST:
            raise ValueError
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _refused(text, "is no expression") from None

    def read(node: ast.expr) -> Condition:
        """Return what a part of the expression says of a row."""
        if isinstance(node, ast.BoolOp):
            parts = [read(part) for part in node.values]
            decides = isinstance(node.op, ast.Or)  # True decides an `or`, False an `and`

            def several(row: Row) -> bool | None:
                found = [part(row) for part in parts]
                return decides if decides in found else None if None in found else not decides

            return several
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            part = read(node.operand)
            return lambda row: None if (found := part(row)) is None else not found
        if not isinstance(node, ast.Compare):
            raise _refused(text, f"{ast.unparse(node)} is no comparison")
        values = [value(one) for one in (node.left, *node.comparators)]
        operators = [COMPARED.get(type(one)) for one in node.ops]
        if None in operators or not any(isinstance(one, str) for one in values):
            raise _refused(text, f"{ast.unparse(node)} compares no score with a number")

        def compared(row: Row) -> bool | None:
            known = [row[one] if isinstance(one, str) else one for one in values]
            if None in known:
                return None
            return all(one(a, b) for one, a, b in zip(operators, known, known[1:]) if one is not None)

        return compared

    def value(node: ast.expr) -> str | float:
        """Return a column's name, or a number."""
        if isinstance(node, ast.Name):
            if node.id not in NUMBERS:
                raise UserError(f"--keep {text}: there is no column {node.id}; there are {', '.join(NUMBERS)}")
            return node.id
        sign = 1
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            node, sign = node.operand, -1
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
            return sign * node.value
        raise _refused(text, f"{ast.unparse(node)} is neither a column nor a number")

    return read(tree)


def _refused(text: str, why: str) -> UserError:
    short = text if len(text) <= 80 else f"{text[:77]}..."
    return UserError(f'--keep {short}: {why}; write comparisons with and, or, not, such as "ipsae > 0.6 and rmsd < 2"')


class Shortlist:
    """What one process has predicted so far, and which of it may be among what is kept at the end.

    Whatever is not among the best of one process is not among the best of all: so the disk never holds many more.
    """

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self._held: list[tuple[tuple[Any, ...], Any]] = []

    def wants(self, row: Row) -> bool:
        """Return whether a prediction may be kept, before its structure is written."""
        if self.selection.best is None:
            return bool(self.selection.chosen([row]))
        return len(self._held) < self.selection.best or self.selection.order(row) < self._held[-1][0]

    def add(self, row: Row, what: Any) -> list[Any]:
        """Note a prediction whose structure is written; return what is no longer among the best."""
        if self.selection.best is None:
            return []
        insort(self._held, (self.selection.order(row), what), key=lambda one: one[0])
        beaten, self._held = self._held[self.selection.best :], self._held[: self.selection.best]
        return [one for _, one in beaten]
