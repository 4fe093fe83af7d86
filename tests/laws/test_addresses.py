"""Path options refuse addresses: `--out s3://bucket/x` must not write to a local folder called `s3:`."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

import warpfold
from tests.test_cli import refused, run
from warpfold import arguments, cli
from warpfold.errors import UserError

ADDRESS = "s3://bucket/x"
# Arguments for a store, which may be an address
STORES = {
    *(("pack", "verify"), ("pack", "info"), ("bench data", "store"), ("finetune", "rehearse")),
    *(("train", "data"), ("validate", "data")),
}
# Text options that are not paths
WORDS = {
    *("model", "inputs"),  # names of functions
    *("batch", "chains", "change", "cluster", "device", "dtype", "fixed_chains", "keep", "kernel", "link", "max_hits"),
    *("max_recycles", "max_template_date", "memory", "msa_server", "name", "only", "op", "released_after"),
    *("released_before", "set", "shapes", "shard", "source", "storage", "trainable", "ways"),
}


def options() -> Iterator[tuple[str, str, list[str], Any]]:
    """Yield every option of every command: command, name, spelling (empty for an argument) and type."""
    main: Any = typer.main.get_command(cli.app)
    found = [(one.name or one.callback.__name__, main, one.callback) for one in cli.app.registered_commands]
    for group in cli.app.registered_groups:
        of: Any = group.typer_instance
        name = str(group.name or of.info.name)
        found.append((name, main, of.registered_callback.callback))
        found += [
            (f"{name} {one.name or one.callback.__name__}", main.commands[name], one.callback)
            for one in of.registered_commands
        ]
    for command, commands, callback in found:
        name = command if command in commands.commands else command.split()[-1]
        spelled = {one.name: one.opts for one in commands.commands[name].params}
        for parameter in inspect.signature(callback).parameters.values():
            kind = next(iter(get_args(parameter.annotation)), parameter.annotation)
            if "Path" in str(kind) or "str" in str(kind):
                yield command, parameter.name, [one for one in spelled[parameter.name] if one.startswith("-")], kind


OPTIONS = [one for one in options() if one[:2] not in STORES and one[1] not in WORDS]


def test_all_commands_have_options() -> None:
    """The next test checks a non-empty list of options."""
    assert len(OPTIONS) > 60
    assert {"predict", "train", "pack", "params fetch", "bench data"} <= {command for command, *_ in OPTIONS}
    assert {name for _, name, *_ in options()} >= WORDS


@pytest.mark.parametrize(("command", "name", "opts", "kind"), OPTIONS, ids=[" ".join(one[:2]) for one in OPTIONS])
def test_a_path_refuses_an_address(
    command: str, name: str, opts: list[str], kind: Any, capsys: pytest.CaptureFixture[str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    said = refused(run(capsys, *command.split(), *opts[:1], ADDRESS))
    assert f"{ADDRESS}: is an address. Give a path of this machine." in said
    assert not list(tmp_path.iterdir())


def test_options_of_python_refuse_addresses() -> None:
    """The functions of commands check their arguments by the same declarations."""
    checked = 0
    for name in warpfold.__all__:
        for one in getattr(getattr(warpfold, name), "declared", ()):
            kind, option = arguments.declaration(one.annotation)
            if option is not None and "PathLike" in str(kind) and option.path is None and option.shell is None:
                checked += 1
                with pytest.raises(UserError, match="is an address"):
                    arguments.check(one.name, one.annotation, ADDRESS)
    assert checked > 10
    for call in (
        lambda: warpfold.predict("MKTAYIAKQRQ", "p.npz", out=ADDRESS),
        lambda: warpfold.fetch_params("model_1", out=ADDRESS),
        lambda: warpfold.pack(["a.cif"], out=ADDRESS),
        lambda: warpfold.train("tiny", "store", Path(ADDRESS)),
    ):
        with pytest.raises(UserError, match=r"out = s3://bucket/x: is an address"):
            call()
