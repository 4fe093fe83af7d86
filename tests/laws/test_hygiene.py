"""Patterns that no file of the project may contain."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from laws_source import ROOT, calls, functions, imports, loaded_at_import, nodes, room, text, trees

NETWORK = {
    *("urllib", "urllib3", "requests", "pooch", "httpx", "aiohttp", "socket", "http", "ftplib", "wget"),
    *("boto3", "botocore", "fsspec", "paramiko"),
}
PICKLES = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}
ASKS_A_SERVER = {
    *(Path("warpfold/download.py"), Path("warpfold/data/search/server.py"), Path("warpfold/data/store/remote.py")),
}
READS_ENVIRONMENT = {"cli", "device", "parallel"}
# Further files that may read the environment: for the credentials of object stores and their cache (shared by all
# commands), for a fork server's children, and for Triton.
READS_ENVIRONMENT_TOO = {
    Path("warpfold/data/store/remote.py"),
    Path("warpfold/data/load/workers.py"),
    Path("warpfold/ops/capabilities.py"),
}
# Private attributes of torch objects that may be used anywhere
OF_TORCH = {
    *("_parameters", "_metadata", "_forward_hooks", "_forward_pre_hooks"),  # modules and their state dicts
    *("_backward_hooks", "_backward_pre_hooks", "_base", "_version"),  # modules and tensors, unchanged since torch 1
    *("_schema", "_opname", "_overloadpacket"),  # the arguments of a dispatch mode; torch's own modes use them
    "_cdata",  # the identity of a storage
    *("_foreach_add_", "_foreach_copy_"),  # documented, in spite of their names
    "_should_skip_dynamo",  # defined by our modes; without it, they are slower in some versions of torch
}
OF_OTHERS = {  # private attributes of other packages
    *("_exit", "_run_exitfuncs", "_fields", "_replace"),  # Python
    "_pack_args",  # Triton's JIT (ops/triton/compile.py)
    "_outgoing",  # layers of Protenix (adapt/kinds.py)
}
SAFE_LOADS = {
    "np.load": ("allow_pickle", "False"),
    "numpy.load": ("allow_pickle", "False"),
    "torch.load": ("weights_only", "True"),
}


def _run(tree: ast.Module) -> ast.Module:
    """Return the statements that run when a file is imported, without those for type checkers."""
    kept = [node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    return ast.Module(kept, [])


def _everything() -> dict[Path, ast.Module]:
    return {**trees(), **trees("tests")}


def _lines(files: dict[Path, ast.Module], pattern: str) -> list[str]:
    """Return every line that matches the pattern, except for those of this file."""
    return [
        f"{path}:{number} {line.strip()}"
        for path in files
        if path.name != Path(__file__).name
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]


def _imported(files: dict[Path, ast.Module], packages: set[str]) -> list[str]:
    return [
        f"{path}:{line} imports {name}"
        for path, tree in files.items()
        for name, line in imports(tree)
        if name.split(".")[0] in packages
    ]


@cache
def _calls() -> list[tuple[str, str, ast.Call]]:
    return [
        (f"{path}:{call.lineno}", text(call.func), call) for path, tree in _everything().items() for call in calls(tree)
    ]


def test_no_pickle() -> None:
    assert not _imported(_everything(), PICKLES)
    assert not [where for where, called, _ in _calls() if called == "torch.save"]


def test_loads_run_no_code() -> None:
    unsafe = []
    for where, called, call in _calls():
        if called in SAFE_LOADS:
            name, value = SAFE_LOADS[called]
            if not any(k.arg == name and ast.unparse(k.value) == value for k in call.keywords):
                unsafe.append(f"{where} {called} without {name}={value}")
    assert not unsafe


def test_no_network() -> None:
    """Three files may access a server that the user has specified. They are only imported when the user requests it."""
    assert not _imported({path: tree for path, tree in trees().items() if path not in ASKS_A_SERVER}, NETWORK)
    assert all(_imported({path: trees()[path]}, NETWORK) for path in ASKS_A_SERVER)
    for name, at_import in (
        ("download", {"warpfold/data/search/server.py"}),
        ("data.search.server", {"warpfold/data/search/fetch.py"}),
        ("data.search.fetch", set()),
    ):
        name = f"warpfold.{name}"
        importing = {path: tree for path, tree in trees().items() if name in dict(imports(tree))}
        assert importing
        assert {str(path) for path, tree in importing.items() if name in loaded_at_import(_run(tree))} == at_import


def test_environment_is_read_at_the_top_only() -> None:
    readers = [
        f"{path}:{node.lineno}"
        for path, tree in trees().items()
        if room(path) not in READS_ENVIRONMENT and path not in READS_ENVIRONMENT_TOO
        for node in nodes(tree)
        if isinstance(node, ast.Attribute) and text(node) in ("os.environ", "os.getenv")
    ]
    assert not readers


def test_errors_are_caught_by_name() -> None:
    broad = []
    for path, tree in trees().items():
        for node in nodes(tree):
            if isinstance(node, ast.ExceptHandler):
                caught = re.findall(r"\w+", ast.unparse(node.type) if node.type else "BaseException")
                if {"Exception", "BaseException"} & set(caught):
                    broad.append(f"{path}:{node.lineno}")
    assert not broad


def test_no_machine_paths() -> None:
    assert not _lines(_everything(), r"[\"'](/work|/home|/root|/tmp|/Users|/mnt)/")


def test_nothing_is_left_over() -> None:
    assert not _lines(_everything(), r"\b([T]ODO|[F]IXME|[X]XX|[H]ACK|coming[ ]soon)\b|NotImplemented[E]rror\(\)")
    assert not _lines(_everything(), r"^\s*#\s*[-=#*]{5,}")


def test_public_names_say_what_they_are() -> None:
    silent = [str(path) for path, tree in trees().items() if tree.body and not ast.get_docstring(tree)]
    for path, tree in trees().items():
        named = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        # Methods too, if they are longer than a few lines
        named += [fn for fn in functions(tree) if (fn.end_lineno or fn.lineno) - fn.lineno >= 8]
        public = [node for node in named if not node.name.startswith("_")]
        silent += [f"{path}:{node.lineno} {node.name}" for node in public if not ast.get_docstring(node)]
    assert not silent


@cache
def _of_ours() -> set[str]:
    """Return every name that the package defines or assigns."""
    found = set()
    for tree in trees().values():
        for node in nodes(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def _private(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield every private name that a file uses: as an attribute, by `getattr` and the like, or by an import."""
    for node in nodes(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and text(node.func) in ("getattr", "hasattr", "setattr"):
            yield ast.literal_eval(node.args[1]) if isinstance(node.args[1], ast.Constant) else "", node.lineno
    for name, line in imports(tree):
        yield from ((part, line) for part in name.split(".") if name.startswith("torch."))


def test_private_parts_of_torch_are_in_one_file() -> None:
    """A later torch may lack private names. Then warpfold/ops/torch_internals.py is the only file to change."""
    allowed = OF_TORCH | OF_OTHERS | _of_ours()
    assert not [
        f"{path}:{line} {name}"
        for path, tree in trees().items()
        if path != Path("warpfold/ops/torch_internals.py")
        for name, line in _private(tree)
        if re.match(r"_(?!_)", name) and name not in allowed
    ]
    used = {name for tree in trees().values() for name, _ in _private(tree)} | _of_ours()
    assert not (OF_TORCH | OF_OTHERS) - used


def _may_fail(fn: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Assert)
        or (
            isinstance(node, ast.Call)
            and re.search(r"assert|raises|check|expect|warns|fail", text(node.func), re.IGNORECASE)
        )
        for node in ast.walk(fn)
    )


def test_files_of_tests_have_names_of_their_own() -> None:
    """Of two files with the same name, pytest imports one, and refuses to run the whole suite."""
    # Interpreted tests run in a separate process.
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "interpreted" not in path.parts]
    names = Counter(path.name for path in files)
    assert [str(path) for path in files if names[path.name] > 1] == []


def test_every_test_can_fail() -> None:
    assert not [
        f"{path}:{fn.lineno} {fn.name}"
        for path, tree in trees("tests").items()
        for fn in functions(tree)
        if fn.name.startswith("test_") and not _may_fail(fn)
    ]


def test_skips_say_why() -> None:
    silent = []
    for where, called, call in _calls():
        if called.endswith(("pytest.skip", "mark.skip", "mark.skipif", "mark.xfail")):
            said = any(k.arg == "reason" for k in call.keywords)
            if not said and not (call.args and called.endswith(".skip")):
                silent.append(where)
    assert not silent
