"""Generate pages from the source: commands, the Python interface, settings, messages, notebooks.

The command line is imported, which loads no heavy package.  Everything else is parsed, so neither torch nor NumPy is
needed.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "warpfold"


# The command line


def commands() -> str:
    """Build the page of all commands with their arguments, options and examples."""
    sys.path.insert(0, str(ROOT))
    from typer.main import get_command

    from warpfold.cli import app

    top = get_command(app)
    lines = [
        "# Commands",
        "",
        "The help of every command in this version.  Exit codes: 0 success, 1 incomplete, 2 bad input (with one line",
        "that gives the reason), 130 Ctrl-C.  On SIGTERM `train` saves and ends with 0, `pack` with 143.",
        "",
        "Every command takes `--quiet` (warnings and errors only), `--verbose` (decisions and tracebacks, too) and, if",
        "it has a result, `--json`.  Existing files that a command did not write are never overwritten.",
        "`warpfold --install-completion` sets up completion for bash, zsh, fish or PowerShell.",
    ]
    for name, command in top.commands.items():
        inner = getattr(command, "commands", {})
        if getattr(command, "invoke_without_command", False) or not inner:
            lines += _command(name, command)
        for word, one in inner.items():
            lines += _command(f"{name} {word}", one)
    return "\n".join(lines) + "\n"


def _command(name: str, command) -> Iterator[str]:
    yield from ("", f"## {name}", "", _plain(command.help or ""), "")
    rows = []
    for parameter in command.params:
        if parameter.name == "help" or getattr(parameter, "hidden", False):
            continue
        names = [*parameter.opts, *parameter.secondary_opts]
        named = parameter.param_type_name == "option"
        shown = (
            ", ".join(f"`{one}`" for one in names) if named else f"`{(parameter.metavar or parameter.name.upper())}`"
        )
        default = parameter.default
        plain = isinstance(default, str | int | float) and not isinstance(default, bool) and default != ""
        says = _plain(getattr(parameter, "help", None) or "")
        if parameter.required and named:
            says += " Required."
        elif plain and getattr(parameter, "show_default", True) and "default:" not in says:
            says += f" Default: {getattr(default, 'value', default)}."
        rows.append(f"| {shown} | {_cell(says)} |")
    if rows:
        yield from ("| | |", "|---|---|", *rows, "")
    for example in (command.epilog or "").split("\n\n"):
        if match := re.match(r"(.*?):\s\s+(warpfold .*)", " ".join(example.split(" ")), re.S):
            yield from (f"{_plain(match[1])}:", "", "```bash", " ".join(match[2].split()), "```", "")
        elif example.strip():
            yield from (_plain(example), "")


def _plain(text: str) -> str:
    """Remove the colour markup from a help text and escape its angle brackets."""
    text = re.sub(r"\[/?[a-z ]*\]", "", text)
    return re.sub(r"<", "&lt;", text).strip()


def _lines(docstring: str) -> str:
    """Convert a docstring to Markdown with a line break before each line "name: ..."."""
    return re.sub(r"\n(?=\w[\w, ]*: )", "  \n", _plain(docstring))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# The Python interface


def python_interface() -> str:
    """Build the page of the public names of `warpfold`; mkdocstrings inserts their docstrings."""
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    public = [name for name in names if not name.startswith("__")]
    functions = [name for name in public if name[0].islower()]
    lines = ["# Python interface", "", "The public names of `warpfold`: functions, then classes."]
    for name in [*functions, *(name for name in public if name not in functions)]:
        lines += ["", f"::: warpfold.{name}"]
    return "\n".join(lines) + "\n"


# The error messages


def messages() -> str:
    """Build the page of all messages about bad input, by file, with `…` for each placeholder."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    errors = {"UserError"}
    for _ in range(3):  # subclasses of subclasses
        errors |= {node.name for node in classes if errors & {ast.unparse(base) for base in node.bases}}
    errors.remove("NotServed")  # a reason, never a message of its own
    lines = [
        "# Messages",
        "",
        "Every message about bad input, by the file that raises it. `…` stands for an object, a value or a number.",
        "The [error index](errors.md) describes the consequences.",
    ]
    for path, tree in trees.items():
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args)
        found = {
            text: None
            for call in calls
            if ast.unparse(call.func).rpartition(".")[2] in errors and (text := _message(call.args[0])).strip("… ")
        }
        if found:
            lines += ["", f"## {path.relative_to(PACKAGE).as_posix()}", ""]
            lines += [f"* `{text.replace('`', chr(39))}`" for text in found]
    return "\n".join(lines) + "\n"


def _message(node: ast.expr) -> str:
    """Return the text of a string expression, with `…` for values that are known only at run time."""
    if isinstance(node, ast.Constant):
        return " ".join(str(node.value).split())
    if isinstance(node, ast.JoinedStr):
        return " ".join("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values).split())
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return f"{_message(node.left)} {_message(node.right)}"
    return "…"


# The notebooks


def notebook(name: str) -> str:
    """Convert a notebook of docs/ to a page with its text, code and stored output."""
    cells = json.loads((ROOT / "docs" / name).read_text(encoding="utf-8"))["cells"]
    shown, heading = [], ""
    for cell in cells:
        text = "".join(cell["source"])
        shown.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        if cell["cell_type"] == "markdown" and text.startswith("#"):
            heading = text.splitlines()[0].lstrip("# ")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text")})
            if picture := data.get("image/png"):
                shown.append(f'<img alt="{heading}" src="data:image/png;base64,{picture.strip()}">')
            else:
                shown.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    get = (
        f"This page is the notebook [{name}]({name}). Download it and open it in Jupyter, where structures can be "
        "rotated and the PAE appears below its cell."
    )
    return "\n\n".join([shown[0], get, *shown[1:]]) + "\n"


# The settings


def settings_reference() -> str:
    """Build the page of all settings: for each section the fields of its dataclass with defaults and comments."""
    classes = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "@dataclass" in source:
            for node in ast.parse(source).body:
                if isinstance(node, ast.ClassDef):
                    classes[node.name] = (node, source.splitlines())
    lines = [
        "# Settings",
        "",
        "Every key of a settings file, with its default.  `--set SECTION.KEY=VALUE` changes one.",
        "The folder [settings](../repository/settings/README.md) has the presets with the sources of their values.",
    ]
    for field, type_name, _, _ in _fields(*classes["RunConfig"]):
        lines += _section(field, type_name, classes)
    return "\n".join(lines) + "\n"


def _section(name: str, type_name: str, classes: dict) -> Iterator[str]:
    node, source = classes[type_name]
    yield from ("", f"## {name}", "", _lines(ast.get_docstring(node) or ""), "")
    inner = []
    yield from ("| key | type | default | |", "|---|---|---|---|")
    for field, annotation, default, comment in _fields(node, source):
        if (of := next((word for word in re.findall(r"\w+", annotation) if word in classes), None)) is not None:
            inner.append((f"{name}.{field}", of))
            default, comment = "", f"a section of its own: [{name}.{field}](#{(name + field).replace('.', '')})"
        yield f"| `{field}` | `{annotation}` | {f'`{default}`' if default else ''} | {_cell(_plain(comment))} |"
    for one in inner:
        yield from _section(*one, classes)


def _fields(node: ast.ClassDef, source: list[str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, default and comment of each field of a dataclass; the comment trails or precedes the field."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            beside = source[(item.end_lineno or item.lineno) - 1][item.end_col_offset :].partition("#")[2].strip()
            above: list[str] = []
            number = item.lineno - 2
            while source[number].strip().startswith("#"):
                above.insert(0, source[number].strip()[1:].strip())
                number -= 1
            default = ast.unparse(item.value) if item.value else ""
            yield item.target.id, ast.unparse(item.annotation), default, " ".join([*above, beside]).strip()
