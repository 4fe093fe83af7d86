"""Small faults of a source, found by its syntax tree: which there are, and a draw of them from a seed."""

import ast
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

# What is drawn from, and apart: files of a folder, without those of folders in it that have a line of their own.
ROOMS = ("ops", "ops/cpu", "ops/triton", "model", "parallel", "engine", "data/features")
# Launch tables, the compiling of kernels and choices among them: no result depends on them.
LEFT_OUT = ("ops/triton/launch.py", "ops/triton/compile.py")

AXIS_CALLS = {
    *("sum", "mean", "amax", "amin", "softmax", "log_softmax", "logsumexp", "cat", "stack", "unsqueeze", "squeeze"),
    *("unbind", "chunk", "split", "narrow", "select", "index_select", "cumsum", "argsort", "flatten", "gather", "any"),
    *("all", "argmax", "argmin", "sort", "topk", "take_along_dim", "take_along_axis", "concatenate", "flip", "size"),
    *("repeat_interleave", "index_add_", "index_copy_", "max", "min", "prod", "norm", "std", "var", "count_nonzero"),
}
AXIS_WORDS = {"dim", "axis", "axes", "dims"}
REDUCTIONS = {
    "sum": "mean",
    "mean": "sum",
    "amax": "amin",
    "amin": "amax",
    "max": "min",
    "min": "max",
    "all": "any",
    "any": "all",
    "prod": "sum",
    "maximum": "minimum",
    "minimum": "maximum",
    "argmax": "argmin",
    "argmin": "argmax",
    "floor": "ceil",
    "ceil": "floor",
    "cumsum": "flip",
    "clamp_min": "clamp_max",
    "clamp_max": "clamp_min",
}
COLLECTIVES = re.compile(
    r"(all_reduce|all_gather\w*|reduce_scatter\w*|all_to_all\w*|sendrecv|broadcast|broadcast_tensors|gather_shards|"
    r"tied|barrier|synchronize|wait_stream|wait_for_all|exchange|isend|irecv|send|recv|wait)$"
)
MASKS = re.compile(r"mask|valid|exists|known|present|wanted|attended|real_", re.I)
SAID = {"warn", "warning", "info", "debug", "print", "UserError", "tell", "TypeVar", "cast", "NewType", "echo", "note"}
COMPARED = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}


@dataclass(frozen=True)
class Mutant:
    """A fault: which characters of a file stand there otherwise."""

    path: str  # below the package
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str
    room: str = ""
    statement: int = 0  # the line on which its statement begins

    @property
    def name(self) -> str:
        """Name it, for as long as the source is the same."""
        return f"{self.path}:{self.line}:{self.start}:{self.kind}:{self.after[:60]}"

    def applied(self, source: str) -> str:
        """Plant it."""
        assert source[self.start : self.end] == self.before, f"{self.name}: the source is another"
        return source[: self.start] + self.after + source[self.end :]


def is_kernel(node: ast.AST) -> bool:
    """Say whether Triton compiles this function, from its source."""
    return isinstance(node, ast.FunctionDef) and any("triton." in ast.unparse(d) for d in node.decorator_list)


class _Finder:
    """Goes through a tree and keeps what could be wrong in it."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source, self.found = path, source, list[Mutant]()
        starts = [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self._starts, self._lines = starts, source.splitlines(keepends=True)
        self._functions: list[str] = []
        self._statement = 0
        self._axes: set[int] = set()  # positions of numbers that are axes

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt | ast.keyword)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.source[start:end]

    def _offer(self, kind: str, node: ast.AST, after: str, span: tuple[int, int] | None = None) -> None:
        start, end = span or self._span(node)
        before = self.source[start:end]
        if before != after:
            line = self.source.count("\n", 0, start) + 1
            self.found.append(
                Mutant(self.path, line, kind, start, end, before, after, statement=self._statement or line)
            )

    def _operator(self, kind: str, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        """Offer another operator between two operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        found = [m for m in re.finditer(r"#[^\n]*|" + re.escape(old), self.source[start:end]) if m[0] == old]
        if found:
            self._offer(kind, left, new, (start + found[0].start(), start + found[0].end()))

    def body(self, statements: Sequence[ast.stmt]) -> None:
        """Go through statements."""
        for statement in statements:
            self._visit_statement(statement)

    def _visit_statement(self, node: ast.stmt) -> None:
        """Offer what could be wrong with a statement as a whole, and go through its parts."""
        outer, self._statement = self._statement, node.lineno
        match node:
            case ast.FunctionDef():
                if node.name not in ("__repr__", "__str__"):
                    for default in [*node.args.defaults, *node.args.kw_defaults]:
                        if default is not None:
                            self._visit(default)
                    self._functions.append(node.name)
                    self.body(node.body)
                    self._functions.pop()
            case ast.ClassDef():
                self.body(node.body)
            case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal() | ast.Pass():
                pass
            case ast.Raise():
                self._offer("statement", node, "pass")
            case ast.Continue() | ast.Break():
                self._offer("statement", node, "pass")
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.Expr(value=ast.Call() as call):
                name = called(call)
                if name not in SAID:
                    kind = "stale" if name.endswith("_") and not name.startswith("__") else "statement"
                    self._offer("collective" if COLLECTIVES.match(name) else kind, node, "pass")
                    self._visit(call)
            case ast.AugAssign():
                self._offer("stale", node, "pass")
                if isinstance(node.op, ast.Add | ast.Sub):
                    old, new = ("+=", "-=") if isinstance(node.op, ast.Add) else ("-=", "+=")
                    self._operator("sign", node.target, node.value, old, new)
                if self._is_backward() and isinstance(node.op, ast.Add):
                    self._operator("adjoint", node.target, node.value, "+=", "=")
                self._visit(node.value)
            case ast.Assign():
                stored = all(isinstance(target, ast.Subscript | ast.Attribute) for target in node.targets)
                if stored and "__init__" not in self._functions and self._functions:
                    self._offer("stale", node, "pass")
                for target in node.targets:
                    self._visit(target)
                self._visit(node.value)
            case ast.AnnAssign():
                if node.value is not None:
                    self._visit(node.value)
            case ast.Return():
                if self._is_backward() and isinstance(node.value, ast.Tuple):
                    for part in node.value.elts:
                        if not isinstance(part, ast.Constant | ast.Starred) and "new_zeros" not in self._text(part):
                            self._offer("adjoint", part, f"({self._text(part)}) * 0")
                if node.value is not None:
                    self._visit(node.value)
            case ast.If():
                if "TYPE_CHECKING" not in ast.unparse(node.test):
                    if not node.orelse and self._functions:
                        self._offer("statement", node.test, "False")
                    self._visit(node.test)
                    self.body(node.body)
                    self.body(node.orelse)
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.stmt):
                        self._visit_statement(child)
                    elif isinstance(child, ast.ExceptHandler | ast.match_case):
                        self.body(child.body)
                    elif isinstance(child, ast.withitem):
                        self._visit(child.context_expr)
                    elif isinstance(child, ast.expr):
                        self._visit(child)
        self._statement = outer

    def _is_backward(self) -> bool:
        return any("backward" in name for name in self._functions)

    def _visit(self, node: ast.AST) -> None:
        """Offer what could be wrong with an expression, and go through its parts."""
        match node:
            case ast.JoinedStr() | ast.Lambda(body=ast.Constant()):
                return
            case ast.Call():
                if called(node) in SAID:
                    return
                self._call(node)
            case ast.BinOp():
                self._binary(node)
            case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
                self._offer("sign", node, self._text(operand))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self._offer("comparison", node, f"bool({self._text(operand)})")
            case ast.BoolOp():
                old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                self._operator("comparison", node.values[0], node.values[1], old, new)
            case ast.Compare(ops=[op]):
                words = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
                words |= {ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"}
                for other in COMPARED[type(op)]:
                    self._operator("comparison", node.left, node.comparators[0], words[type(op)], other)
            case ast.Subscript():
                self._visit(node.value)
                self._index(node.slice)
                return
            case (ast.Constant() as number) | ast.UnaryOp(op=ast.USub(), operand=ast.Constant() as number):
                if self._span(node)[0] not in self._axes:
                    self._constant(number)
                return
            case ast.keyword(arg=word) if word in AXIS_WORDS:
                self._axis(node.value)
                return
        for part in ast.iter_child_nodes(node):
            self._visit(part)

    def _call(self, node: ast.Call) -> None:
        """Offer another reduction, axis or range, and a call that is left out."""
        name, function = called(node), node.func
        receiver = function.value if isinstance(function, ast.Attribute) else None
        if name in REDUCTIONS and (receiver is not None or name in ("min", "max", "all", "any")):
            end = self._span(function)[1]
            self._offer("reduction", node, REDUCTIONS[name], (end - len(name), end))
        if name in AXIS_CALLS and receiver is not None:
            for argument in node.args[:3]:
                if not (name in ("narrow", "select") and argument is not node.args[0]):
                    self._axis(argument)
        if name in ("transpose", "movedim", "permute", "flip") and receiver is not None:
            module = isinstance(receiver, ast.Name) and receiver.id in ("torch", "tl", "np")
            self._offer("axis", node, self._text(node.args[0] if module else receiver))
        if name == "range":
            last = node.args[0] if len(node.args) == 1 else node.args[1]
            self._offer("off by one", last, f"({self._text(last)}) - 1")
            if len(node.args) > 1:
                self._offer("off by one", node.args[0], f"({self._text(node.args[0])}) + 1")
        if name == "where" and len(node.args) == 3:
            self._offer("mask", node, self._text(node.args[1]))
        if name in ("masked_fill", "masked_fill_") and receiver is not None:
            self._offer("mask", node, self._text(receiver))
        if COLLECTIVES.match(name) and node.args and not isinstance(node.args[0], ast.Starred):
            self._offer("collective", node, self._text(node.args[0]))
        if name.endswith("_") and not name.startswith("_") and receiver is not None:
            self._offer("stale", node, self._text(receiver))

    def _binary(self, node: ast.BinOp) -> None:
        """Offer another sign, a mask or a term left out."""
        left, right = node.left, node.right
        strings = any(isinstance(side, ast.JoinedStr | ast.List | ast.Tuple) for side in (left, right))
        strings |= any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in (left, right))
        if strings:
            return
        if isinstance(node.op, ast.Add | ast.Sub):
            old, new = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
            self._operator("sign", left, right, old, new)
            if isinstance(right, ast.Constant) and right.value == 1:
                self._offer("off by one", node, f"({self._text(left)})")
            elif self._is_backward():
                self._offer("adjoint", node, f"({self._text(left)})")
        if isinstance(node.op, ast.Mult | ast.BitAnd):
            for side, other in ((left, right), (right, left)):
                if MASKS.search(self._text(side)):
                    self._offer("mask", node, f"({self._text(other)})")
        if isinstance(node.op, ast.Mult):
            self._operator("sign", left, right, "*", "* -1 *")
        if isinstance(node.op, ast.Div):
            self._operator("constant", left, right, "/", "* 2 /")

    def _axis(self, node: ast.AST) -> None:
        """Offer a neighbour of an axis."""
        parts: Sequence[ast.AST] = node.elts if isinstance(node, ast.Tuple | ast.List) else [node]
        for part in parts:
            number = integer(part)
            if number is not None:
                other = {-1: -2, 0: 1}.get(number, number - 1 if number > 0 else number + 1)
                self._offer("axis", part, str(other))
                self._axes.add(self._span(part)[0])

    def _index(self, node: ast.AST) -> None:
        """Offer bounds and indices that are off by one."""
        parts: Sequence[ast.AST] = node.elts if isinstance(node, ast.Tuple) else [node]
        for part in parts:
            if isinstance(part, ast.Slice):
                for bound in (part.lower, part.upper):
                    if bound is not None:
                        number = integer(bound)
                        self._offer("off by one", bound, str(number + 1) if number else f"({self._text(bound)}) + 1")
                        if number is None:
                            self._visit(bound)
                if part.step is not None:
                    self._visit(part.step)
            elif (number := integer(part)) is not None:
                self._offer("off by one", part, str(number + 1 if number >= 0 else number - 1))
            elif not (isinstance(part, ast.Constant)):
                self._visit(part)

    def _constant(self, node: ast.Constant) -> None:
        """Offer another number."""
        value = node.value
        if isinstance(value, bool):
            self._offer("constant", node, str(not value))
        elif isinstance(value, float) and value == value and abs(value) != float("inf"):
            text = self._text(node)
            self._offer("constant", node, f"({text} * 100)" if 0 < abs(value) < 1e-3 else f"({text} * 1.01 + 1e-3)")
        elif isinstance(value, int):
            self._offer("constant", node, str(value + 1) if value < 2 else str(2 * value))


def called(node: ast.Call) -> str:
    """Return the last component of the called function's name."""
    function = node.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def integer(node: ast.AST) -> int | None:
    """Return the whole number that is written there, if it is one."""
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
            return -number
    return None


def mutants(path: str, source: str) -> list[Mutant]:
    """Find all faults that can be planted in a file, in the order of the source."""
    finder = _Finder(path, source)
    tree = ast.parse(source)
    if path.startswith("ops/triton/"):  # the tables and lists at the top of these are what launches are chosen from
        tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    finder.body(tree.body)
    return sorted(set(finder.found), key=lambda one: (one.start, one.end, one.kind, one.after))


def room_files(package: Path, room: str) -> list[Path]:
    """List the files of a folder, without its subfolders that are in `ROOMS`."""
    inner = [package / other for other in ROOMS if other.startswith(f"{room}/")]
    files = sorted((package / room).rglob("*.py"))
    kept = [path for path in files if not any(path.is_relative_to(other) for other in inner)]
    return [path for path in kept if path.relative_to(package).as_posix() not in LEFT_OUT]


def draw(package: Path, counts: dict[str, int], seed: int) -> list[Mutant]:
    """Draw a number of faults from each folder, from all kinds in equal numbers where possible, at most one per line.

    The order distributes the folders evenly, so any prefix has a share of each folder.
    """
    drawn: list[tuple[float, Mutant]] = []
    for room, count in counts.items():
        generator = random.Random(f"{seed} {room}")
        kinds: dict[str, list[Mutant]] = {}
        for path in room_files(package, room):
            for one in mutants(path.relative_to(package).as_posix(), path.read_text(encoding="utf-8")):
                kinds.setdefault(one.kind, []).append(replace(one, room=room))
        for kind in sorted(kinds):
            generator.shuffle(kinds[kind])
        seen: set[tuple[str, int]] = set()
        while len(seen) < count and any(kinds.values()):
            for kind in sorted(kinds):
                while kinds[kind] and (kinds[kind][-1].path, kinds[kind][-1].line) in seen:
                    kinds[kind].pop()
                if kinds[kind] and len(seen) < count:
                    one = kinds[kind].pop()
                    seen.add((one.path, one.line))
                    drawn.append((len(seen) / count, one))
    return [one for _, one in sorted(drawn, key=lambda item: item[0])]
