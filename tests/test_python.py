"""Test the Python interface: its names, agreement with the command line, errors at the call, lists and files."""

import ast
import inspect
import pkgutil
import re
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

import warpfold
from tests.helpers import tiny_multimer
from warpfold import cli
from warpfold.arguments import PathLike, Paths, check, decides, declaration
from warpfold.data.formats.alignment import read_alignment
from warpfold.data.pack.options import ExampleOptions, PackOptions
from warpfold.errors import UserError, as_arguments, options_given
from warpfold.model.confidence import pae as expected_error
from warpfold.model.confidence import plddt as expected_lddt
from warpfold.model.heads import pae_breaks
from warpfold.model.weights import files as weights
from warpfold.prediction.predictor import Predictor, load
from warpfold.prediction.request import Request
from warpfold.training.config import load_settings

ONE, TWO = "MKTAYIAKQRQISFVKSH", "GSHMKTAYIAK"
ROW = "-KTAYLAKQRQISFVRSH"
SOURCE = ast.parse(Path(warpfold.__file__).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def predictor(tiny_params: Path) -> Predictor:
    return load(tiny_params, device="cpu")


# ---- names


def test_editors_and_the_module_know_the_same_names() -> None:
    (block,) = (node for node in SOURCE.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imported = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == warpfold._MODULES
    assert set(warpfold.__all__) == {*imported, "__version__"}
    assert set(warpfold.__all__) <= set(dir(warpfold))
    assert Path(warpfold.__file__).with_name("py.typed").is_file()  # PEP 561: checkers read the types
    for name in warpfold.__all__:
        assert getattr(warpfold, name) is not None
    assert set(dir(warpfold)) == set(warpfold.__all__)
    assert warpfold.ops.layers.triangle_multiplication.__doc__
    assert warpfold.ops.attention.attention.__doc__
    # The attribute of an imported submodule would hide a function of the same name.
    submodules = {one.name for one in pkgutil.iter_modules(warpfold.__path__)}
    assert submodules & set(warpfold.__all__) == {"ops"}
    with pytest.raises(AttributeError, match="no attribute 'fold'"):
        warpfold.fold  # noqa: B018  # type: ignore[attr-defined]


# ---- one interface: the options of a command are declared by its function

COMMANDS: dict[str, Any] = cli.typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
PYTHON_ALONE = {"progress", "watch", "team"}
SHELL_ALONE = {
    *("help", "quiet", "verbose", "as_json", "help_all", "examples", "axial", "branch"),
    *("verify", "info", "toml"),  # other output of `pack` and `params`
}


def function_of(command: str) -> Callable[..., Any]:
    """Return the function of a command in Python."""
    return getattr(warpfold, {"params fetch": "fetch_params"}.get(command, command))


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"bench"}))
def test_a_function_declares_the_options_of_its_command(command: str) -> None:
    function = function_of(command)
    arguments, options = inspect.signature(function).parameters, {one.name: one for one in COMMANDS[command].params}
    assert set(arguments) - set(options) <= PYTHON_ALONE
    assert set(options) - set(arguments) <= SHELL_ALONE
    documented = str(function.__doc__)
    for one in function.declared:  # type: ignore[attr-defined]
        option = declaration(one.annotation)[1]
        assert (option is None) == (one.name not in options)
        if option is not None:
            assert options[one.name].help == option.help
            assert documented.count(f"\n    {one.name}: {option.help}") == 1
            assert options[one.name].required == (one.default is inspect.Parameter.empty), one.name
            if not options[one.name].required:
                default = getattr(options[one.name].default, "value", options[one.name].default)
                assert default == one.default, one.name


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"bench"}))
def test_a_signature_is_the_one_in_the_source(command: str) -> None:
    """Editors read the source, and help() shows the same names, types and defaults."""
    function = function_of(command)
    written, shown = inspect.signature(inspect.unwrap(function)), inspect.signature(function)
    tree = ast.parse(Path(inspect.getfile(inspect.unwrap(function))).read_text(encoding="utf-8"))
    (source,) = (one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == function.__name__)
    assert [one.arg for one in (*source.args.args, *source.args.kwonlyargs)] == list(shown.parameters)
    assert list(shown.parameters) == list(written.parameters)
    assert shown.return_annotation == written.return_annotation
    for one, other in zip(shown.parameters.values(), written.parameters.values(), strict=True):
        assert (one.default, one.kind) == (other.default, other.kind), one.name
        assert one.annotation == declaration(other.annotation)[0], one.name


def test_shared_options_are_written_out_as_their_dataclass_declares_them() -> None:
    for function, kind in (
        (warpfold.predict, Request),
        (warpfold.distill, Request),
        (warpfold.distill, ExampleOptions),
        (warpfold.pack, PackOptions),
    ):
        arguments = inspect.signature(function).parameters
        for field in fields(kind):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            assert arguments[field.name].default == default, field.name
            assert arguments[field.name].annotation == declaration(field.type)[0], field.name
            assert (arguments[field.name].kind is inspect.Parameter.KEYWORD_ONLY) == field.kw_only, field.name


def test_folding_declares_what_predict_does() -> None:
    predict = inspect.signature(warpfold.predict).parameters
    known = set()
    for function in (load, Predictor.fold, Predictor.fold_many, Predictor.score_designs):
        for name, parameter in inspect.signature(function).parameters.items():
            # The Python call keeps the representations in memory and writes no store.
            kept = name == "representations"
            if name in predict and predict[name].default is not inspect.Parameter.empty and not kept:
                assert parameter.default == predict[name].default, (function, name)
                known.add(name)
    assert {"max_msa", "max_extra", "recycle_tolerance", "max_recycles", "hits", "template_structures"} <= known


def test_values_are_checked_as_they_are_declared() -> None:
    assert check("n", Annotated[int, decides("", min=1)], np.int64(3)) == 3
    assert check("p", Annotated[Paths | None, decides("")], "a") == [Path("a")]
    assert check("p", Annotated[PathLike | None, decides("")], None) is None
    # Parameters without a declared option are not checked.
    assert check("anything", "Team | None", 5) == 5
    for hint, value, says in (
        (Annotated[int, decides("", min=1)], 0, "x = 0: at least 1"),
        (Annotated[int | None, decides("", max=3)], 4, "x = 4: at most 3"),
        (Annotated[int, decides("")], None, "x = None: a whole number"),
        (Annotated[int, decides("")], True, "x = True: a whole number"),
        (Annotated[float, decides("", above=0)], 0, "x = 0: a number over 0"),
        (Annotated[float, decides("")], float("nan"), "x = nan: a finite number"),
        (Annotated[float, decides("")], "1", "x = '1': a number is needed"),
        (Annotated[bool, decides("")], 1, "x = 1: True or False"),
        (Annotated[str | None, decides("")], "", "x = '': a text"),
        (Annotated[Literal["a", "b"], decides("")], "c", "x = 'c': not one of a, b"),
        (Annotated[PathLike, decides("")], 5, "x = 5: a path is needed"),
        (Annotated[Paths, decides("")], [5], r"x\[0\] = 5: a path is needed"),
        (Annotated[Paths, decides("")], 5, "x = 5: a path or a list of paths"),
        (Annotated[list[int] | None, decides("", min=4)], 5, "x = 5: a list is needed"),
        (Annotated[list[int] | None, decides("", min=4)], [5, 3], r"x\[1\] = 3: at least 4"),
        (Annotated[list[str], decides("")], [5], r"x\[0\] = 5: a text"),
    ):
        with pytest.raises(UserError, match=f"^{says}"):
            check("x", hint, value)
        with options_given(), pytest.raises(UserError, match=r"^--x"):
            check("x", hint, value)


def test_options_in_messages_become_arguments() -> None:
    message = "--a-b 1: start torchrun --nproc 2 with `warpfold --a-b`, not --c"
    assert as_arguments(message, {"a_b": "a_b"}) == "a_b 1: start torchrun --nproc 2 with `warpfold --a-b`, not --c"
    with options_given():
        assert as_arguments(message, {"a_b": "a_b"}) == message


# ---- calls


def test_functions_print_nothing_and_report_progress(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    plan = warpfold.plan("tiny", residues=[20], device="H100", progress=lambda done, total, what: told.append(what))
    assert plan["targets"][0]["name"] == "20 residues"
    assert "machine" in warpfold.doctor(device="cpu")
    assert warpfold.tune(op=["gate"], quick=True, dry_run=True)["launches"]
    size = {"residues": 8, "sequences": 3, "extra": 3, "blocks": 1}
    profile = warpfold.profile("tiny", device="cpu", forward=True, **size, progress=lambda *now: told.append(now[2]))
    assert profile["rows"]
    assert told
    assert capfd.readouterr() == ("", "")


# ---- alignments and complexes, in every accepted form


def test_an_alignment_is_rows_a_file_or_an_object(predictor: Predictor, tmp_path: Path) -> None:
    path = tmp_path / "q.a3m"
    path.write_text(f">q\n{ONE}\n>r\n{ROW}\n")
    rows = predictor.fold(ONE, [ROW])
    for given in (str(path), path, [path], tmp_path, read_alignment(path), (ONE, ROW)):
        np.testing.assert_array_equal(predictor.fold(ONE, given).positions, rows.positions)
    with pytest.raises(UserError, match="first row has 18 residues, the query has 11"):
        predictor.fold(TWO, path)
    with pytest.raises(UserError, match="first row has 18 residues, the query has 11"):
        predictor.fold(TWO, read_alignment(path))


def test_a_complex_is_a_text_a_list_or_a_mapping(tmp_path: Path) -> None:
    folder = Predictor(tiny_multimer(recycles=0))
    (tmp_path / "q.a3m").write_text(f">q\n{ONE}\n>r\n{ROW}\n")
    first = folder.fold([ONE, TWO], [[ROW], None])
    assert first.chain_ids == ("A", "B")
    for chains, alignment in (
        (f"{ONE}:{TWO}", tmp_path / "q.a3m"),
        ({"A": ONE, "B": TWO}, {"A": tmp_path / "q.a3m"}),
        ([ONE, TWO], [str(tmp_path / "q.a3m")]),
    ):
        np.testing.assert_array_equal(folder.fold(chains, alignment).positions, first.positions)
    assert re.fullmatch(r"<Prediction query: 29 residues in 2 chains, pLDDT .*, ipTM .*, pTM .*>", repr(first))


# ---- several proteins


def test_many_are_folded_as_each_alone_and_failures_are_results(predictor: Predictor) -> None:
    told: list[tuple[float, int, str]] = []
    given = {"long": ONE, "bad": "MK*", "short": TWO, "empty": "", "mid": ONE[:14]}
    found = predictor.fold_many(
        given, {"long": [ROW], "mid": ["AC"]}, seed=3, progress=lambda *now: told.append(now), logits=True
    )
    assert [one.name for one in found] == list(given)
    assert [bool(one.prediction) for one in found] == [True, False, True, False, False]
    assert "not an amino acid" in found[1].error
    assert "bad" in repr(found[1])
    alone = predictor.fold(ONE, [ROW], seed=3, representations=False)
    together = found[0].prediction
    assert together is not None
    assert together.pair is None
    # The proteins shared a batch, so products were rounded differently, by about 1e-3 Å for these filled models.
    np.testing.assert_allclose(together.plddt, alone.plddt, atol=1e-3)
    # Unreadable inputs have already failed.
    assert told[0][:2] == (3, 5)
    assert told[-1][:2] == (5, 5)


def test_many_from_a_file(predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "all.fasta").write_text(f">one\n{ONE}\n>two\n{TWO}\n")
    (tmp_path / "one.a3m").write_text(f">q\n{ONE}\n>r\n{ROW}\n")
    found = predictor.fold_many(tmp_path / "all.fasta", tmp_path / "one.a3m", batch=1)
    assert [one.name for one in found] == ["one", "two"]
    assert found[0].prediction is not None
    np.testing.assert_array_equal(found[0].prediction.positions, predictor.fold(ONE, [ROW]).positions)


# ---- contents of a prediction


def test_logits_are_what_the_confidences_are_made_of(predictor: Predictor) -> None:
    found = predictor.fold(ONE, [ROW], logits=True, distogram=True)
    logits = {name: torch.from_numpy(np.array(array)) for name, array in found.logits.items()}
    np.testing.assert_allclose(expected_lddt(logits["plddt"]), found.plddt, rtol=1e-5)
    np.testing.assert_allclose(expected_error(logits["pae"], pae_breaks()), found.pae, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(logits["distogram"].softmax(-1), found.distogram, atol=2**-11)
    assert logits["masked_msa"].shape == (2, 18, 23)
    assert logits["resolved"].shape == (18, 37)
    assert not predictor.fold(ONE).logits


def test_a_predictor_moves_and_computes_the_same(tiny_params: Path) -> None:
    predictor = load(tiny_params, device="cpu", precision="bf16")
    before = predictor.fold(ONE)
    assert predictor.to("cpu") is predictor
    np.testing.assert_array_equal(predictor.fold(ONE).positions, before.positions)
    assert re.fullmatch(r"<Predictor of single chains: [\d,]+ parameters, bf16 on cpu>", repr(predictor))
    assert len(repr(before)) < 100


def test_what_load_is_told_of_the_alignment_and_recycling(tiny_params: Path) -> None:
    told = load(tiny_params, "cpu", max_msa=2, max_extra=0, max_recycles="17:0", recycle_tolerance=0)
    assert (told.sample.max_msa, told.sample.max_extra) == (2, 0)
    assert told.fold(ONE).details["recycles"] == 0
    assert told.fold(ONE[:17]).details["recycles"] == 1


# ---- settings and stores


def test_settings_by_name_values_or_object() -> None:
    named = load_settings("tiny", ["train.steps=5"]).config()
    assert load_settings({"base": "tiny", "train": {"steps": 5}}).config() == named
    assert load_settings(named).config() == named
    assert load_settings(named, ["train.steps=6"]).config() == replace(named, train=replace(named.train, steps=6))


# ---- paths


def test_whatever_takes_a_path_takes_text_too() -> None:
    walked, narrow = set(), []
    for name in (*warpfold.__all__, "save_params"):
        found = getattr(weights if name == "save_params" else warpfold, name)
        methods = inspect.getmembers(found, inspect.isfunction) if inspect.isclass(found) else [("", found)]
        for method, function in methods:
            if not callable(function) or (
                method.startswith("_") and (method, name == "ParamsFile") != ("__init__", False)
            ):
                continue
            for parameter in inspect.signature(function).parameters.values():
                words = set(re.findall(r"\w+", str(parameter.annotation)))
                if words & {"Path", "PathLike", "Paths", "StoreLike"} and "Callable" not in words:
                    walked.add(f"{name}.{method}".rstrip("."))
                    narrow += [] if words & {"str", "PathLike", "Paths", "StoreLike"} else [f"{name}: {parameter}"]
    assert not narrow
    assert {"load", "pack", "predict", "save_params", "Checkpoints.__init__", "Prediction.save"} <= walked
