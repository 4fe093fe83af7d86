"""Pages made of the source: the command line, the Python interface, the settings, the messages, the notebooks.

The command line is imported (it imports nothing heavy), the rest is read as text: neither torch nor NumPy is needed.
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
    """Return the page of all commands: what each does, its arguments and options, its examples."""
    sys.path.insert(0, str(ROOT))
    from typer.main import get_command

    from warpfold.cli import app

    top = get_command(app)
    lines = [
        "# Commands",
        "",
        "What `warpfold COMMAND --help` says, of this version.  Exit codes: 0 everything was done, 1 something was",
        "not, 2 the input is at fault (one line says why), 130 Ctrl-C.",
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
    """Return a text of --help without the marks of its colours, and with angle brackets that HTML leaves alone."""
    text = re.sub(r"\[/?[a-z ]*\]", "", text)
    return re.sub(r"<", "&lt;", text).strip()


def _lines(docstring: str) -> str:
    """Return a docstring in which lines that explain a name, "name: ...", stay lines of their own."""
    return re.sub(r"\n(?=\w[\w, ]*: )", "  \n", _plain(docstring))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# The Python interface


def python_interface() -> str:
    """Return the page of everything that `import warpfold` offers, from docstrings (mkdocstrings fills it in)."""
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    public = [name for name in names if not name.startswith("__")]
    functions = [name for name in public if name[0].islower()]
    lines = ["# Python", "", "All that `import warpfold` offers: functions, then classes."]
    for name in [*functions, *(name for name in public if name not in functions)]:
        lines += ["", f"::: warpfold.{name}"]
    return "\n".join(lines) + "\n"


# The error messages


def messages() -> str:
    """Return the page of all messages of bad input, by package, as they are written in the source.

    Each placeholder of a message is shown as `…`.
    """
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    errors = {"UserError"}
    for _ in range(3):  # subclasses of subclasses
        errors |= {node.name for node in classes if errors & {ast.unparse(base) for base in node.bases}}
    errors.remove("NotServed")  # a reason, never a message of its own
    lines = [
        "# Messages",
        "",
        "Every message that a command or function prints for bad input, by the file that raises it. `…` stands for the",
        "object, a value or a number. The [error index](errors.md) describes what happens then.",
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
    """Return the text of a string expression, with `…` for whatever is known at run time alone."""
    if isinstance(node, ast.Constant):
        return " ".join(str(node.value).split())
    if isinstance(node, ast.JoinedStr):
        return " ".join("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values).split())
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return f"{_message(node.left)} {_message(node.right)}"
    return "…"


# The notebooks


def notebook(name: str) -> str:
    """Return a notebook of docs/ as a page: its text, its code, and what its cells showed when it was stored."""
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
        f"This page is the notebook [{name}]({name}): save it, and open it in Jupyter, where a structure turns "
        "and the PAE is shown below the cell that names it."
    )
    return "\n\n".join([shown[0], get, *shown[1:]]) + "\n"


# The settings


def settings_reference() -> str:
    """Return the page of all settings: each section's dataclass, its fields, defaults, and the comments beside them."""
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
        "The presets, and the sources of their values, are in the folder [settings](../repository/settings/README.md).",
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
    """Yield name, type, default and comment of the fields of a dataclass: the comment beside it, or those above it."""
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
