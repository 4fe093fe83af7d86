"""Select the predictions of a run whose structures are kept: the best by a score, or the matches of an expression.

Expressions are parsed with Python's `ast` and limited to comparisons, `and`, `or` and `not`. They are never executed.
"""

import ast
import operator
import re
from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from warpfold.errors import UserError

# The scores in the table of a run, and whether a larger value is better.
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
# Scores that need predicted aligned errors.
OF_ERRORS = (
    *("ptm", "iptm", "pair_iptm", "ipsae", "ipsae_ab", "ipsae_ba", "ipsae15"),
    *("pdockq2", "lis", "pae_interaction", "interface_pae"),
)
# Scores that need the designed structure.
OF_GIVEN = ("rmsd", "binder_rmsd", "target_rmsd")
# Scores that need at least two chains.
OF_COMPLEXES = [name for name in MORE_IS_BETTER if name not in (*OF_GIVEN, "mean_plddt", "ptm", "ranking_confidence")]
NUMBERS = (*MORE_IS_BETTER, "length", "seed")
MAX_EXPRESSION = 1000  # characters
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
# Returns None if the row lacks a value that decides the condition.
Condition = Callable[[Row], bool | None]


@dataclass(frozen=True)
class Selection:
    """The criterion of `--keep`: the `best` predictions by `score`, or all that satisfy the expression `text`.

    score: a column of the table; None selects the default, which depends on the queries.
    """

    text: str
    best: int | None = None
    score: str | None = None

    @property
    def scores(self) -> list[str]:
        """Return the columns that the criterion reads."""
        if self.best is not None:
            return [] if self.score is None else [self.score]
        return [node.id for node in ast.walk(ast.parse(self.text, mode="eval")) if isinstance(node, ast.Name)]

    def order(self, row: Row) -> tuple[Any, ...]:
        """Compute the sort key of a row: best first, rows without the score last."""
        assert self.score is not None
        value = row[self.score]
        is_missing = value is None
        cost = -value if MORE_IS_BETTER[self.score] and not is_missing else value
        return is_missing, cost, row["name"], row["model"] or "", row["seed"]

    def chosen(self, rows: Iterable[Row]) -> set[int]:
        """Select rows of a run; returns their indices."""
        all_rows = list(rows)
        if self.best is None:
            condition = _parse_expression(self.text)
            return {index for index, row in enumerate(all_rows) if condition(row)}
        return set(sorted(range(len(all_rows)), key=lambda index: self.order(all_rows[index]))[: self.best])


def keep_of(given: Any) -> int | Selection | None:
    """Parse `--keep`: a number of predictions per query, or a selection from all predictions.

    Raises UserError for any other value. An unknown column is reported together with the known ones.
    """
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given > 0):
        return given
    text = " ".join(given.split()) if isinstance(given, str) else ""
    if _COUNT.fullmatch(text):
        return int(text)
    option = f"--keep {given}"
    if text.startswith("best:") or not text:
        number, _, score = text.removeprefix("best:").partition(":")
        if not _COUNT.fullmatch(number) or (score == "" and text.endswith(":")):
            raise UserError(f'{option}: write a number, best:100, best:100:ipsae, or "ipsae > 0.6 and rmsd < 2"')
        if score and score not in MORE_IS_BETTER:
            raise UserError(f"{option}: unknown score {score}. Use one of {', '.join(MORE_IS_BETTER)}")
        return Selection(text, int(number), score or None)
    _parse_expression(text)
    return Selection(text)


def _parse_expression(text: str) -> Condition:
    """Compile an expression to a function of a row. Raises UserError if the expression is invalid."""
    try:
        if len(text) > MAX_EXPRESSION:
            raise ValueError
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _invalid_expression(text, "not an expression") from None

    def compile_condition(node: ast.expr) -> Condition:
        """Compile one node of the expression."""
        if isinstance(node, ast.BoolOp):
            conditions = [compile_condition(operand) for operand in node.values]
            # Kleene logic: one True decides an `or` and one False an `and`, even if other operands are unknown.
            decisive = isinstance(node.op, ast.Or)

            def combine(row: Row) -> bool | None:
                values = [condition(row) for condition in conditions]
                return decisive if decisive in values else None if None in values else not decisive

            return combine
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            condition = compile_condition(node.operand)
            return lambda row: None if (value := condition(row)) is None else not value
        if not isinstance(node, ast.Compare):
            raise _invalid_expression(text, f"{ast.unparse(node)} is not a comparison")
        operands = [parse_operand(operand) for operand in (node.left, *node.comparators)]
        operators = [COMPARED.get(type(operator)) for operator in node.ops]
        if None in operators or not any(isinstance(operand, str) for operand in operands):
            raise _invalid_expression(text, f"{ast.unparse(node)} does not compare a score with a number")

        def compare(row: Row) -> bool | None:
            values = [row[operand] if isinstance(operand, str) else operand for operand in operands]
            if None in values:
                return None
            return all(holds(a, b) for holds, a, b in zip(operators, values, values[1:]) if holds is not None)

        return compare

    def parse_operand(node: ast.expr) -> str | float:
        """Return a column's name, or a number."""
        if isinstance(node, ast.Name):
            if node.id not in NUMBERS:
                raise UserError(f"--keep {text}: unknown column {node.id}. Use one of {', '.join(NUMBERS)}")
            return node.id
        sign = 1
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            node, sign = node.operand, -1
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
            return sign * node.value
        raise _invalid_expression(text, f"{ast.unparse(node)} is neither a column nor a number")

    return compile_condition(tree)


def _invalid_expression(text: str, reason: str) -> UserError:
    short = text if len(text) <= 80 else f"{text[:77]}..."
    return UserError(f'--keep {short}: {reason}. Write comparisons with and, or, not: "ipsae > 0.6 and rmsd < 2"')


class Shortlist:
    """The candidates for the final selection among the predictions of one process.

    A prediction that is not among the best of its process is not among the best of all. Deleting it at once keeps the
    disk usage of a run near that of the final selection.
    """

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        # Sort key and payload of each candidate, best first.
        self._candidates: list[tuple[tuple[Any, ...], Any]] = []

    def wants(self, row: Row) -> bool:
        """Return whether a prediction is a candidate, before its structure is written."""
        if self.selection.best is None:
            return bool(self.selection.chosen([row]))
        return len(self._candidates) < self.selection.best or self.selection.order(row) < self._candidates[-1][0]

    def add(self, row: Row, payload: Any) -> list[Any]:
        """Add a prediction whose structure was written; returns the payloads of candidates that it displaced."""
        if self.selection.best is None:
            return []
        insort(self._candidates, (self.selection.order(row), payload), key=lambda candidate: candidate[0])
        displaced = self._candidates[self.selection.best :]
        self._candidates = self._candidates[: self.selection.best]
        return [payload for _, payload in displaced]
