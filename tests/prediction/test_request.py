"""Test the request of `predict`: help text, Python signature, and validation before torch is imported."""

import json
import os
import re
import subprocess
import sys
from dataclasses import MISSING, FrozenInstanceError, asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import typer

import warpfold
from tests.helpers import tiny_config
from tests.messages.table import CASES
from tests.prediction.runs import write_entry
from warpfold import cli
from warpfold.arguments import WrongArgument, declaration
from warpfold.bulk import JobPart
from warpfold.cli.predict import ESSENTIAL
from warpfold.data.example import query_files
from warpfold.data.features.choose import SampleConfig
from warpfold.data.search.server import AlignmentServer
from warpfold.errors import UserError
from warpfold.prediction.params import Params
from warpfold.prediction.request import FoldOptions, Recycling, Request, parse_batch, parse_chains, server_of

ONE = "MKTAYIAKQRQISFVKSH"


def help_of(option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    with pytest.raises(SystemExit):
        cli.main(["predict", option])
    return capsys.readouterr().out.splitlines()


def test_help_is_short_and_help_all_names_every_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command: Any = typer.main.get_command(cli.app).commands["predict"]  # type: ignore[attr-defined]
    options = {one.name: one.opts[0] for one in command.params if one.param_type_name == "option"}
    assert set(ESSENTIAL) < set(options)
    short, full = (help_of(option, monkeypatch, capsys) for option in ("--help", "--help-all"))
    assert len(ESSENTIAL) <= 13
    assert len(short) < 100
    for lines, names in ((short, [options[name] for name in ESSENTIAL]), (full, list(options.values()))):
        assert max(map(len, lines)) <= 80
        words = " ".join(lines).replace(",", " ").split()
        assert not set(names) - set(words)
        assert not [word for word in words if word.startswith("--") and word.endswith("…")]
    assert "--save-recycles" not in " ".join(short).split("Example:")[0]


RUN = """
import shlex, sys
from warpfold import cli
for line in {lines}:
    try: cli.main(shlex.split(line)[1:])
    except SystemExit as end: print("torch" in sys.modules, end.code)
"""


def test_a_request_is_checked_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "p.npz").write_bytes(b"parameters")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("mine")
    # The messages are tested with their tables.
    lines = [case.call for case in CASES if "--params p.npz" in case.call]
    code = RUN.format(lines=lines)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert len(lines) > 15
    assert done.stdout.splitlines() == ["False 2"] * len(lines), done.stderr


def test_a_cluster_without_dask_leaves_nothing(
    tmp_path: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.setitem(sys.modules, "distributed.scheduler", None)
    with pytest.raises(warpfold.UserError, match=r"^cluster tcp://host:1: needs Dask"):
        warpfold.predict(ONE, tiny_params, tmp_path / "out", device="cpu", cluster="tcp://host:1")
    assert not list(tmp_path.iterdir())


def test_python_checks_a_request_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys, warpfold\n"
        f"try: warpfold.predict({ONE!r}, 'none.npz', 'out', device='cpu')\n"
        "except warpfold.UserError as error: print(error, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "none.npz: no such file. Check the path. False\n"


# ---- The request itself

DEFAULTS = {
    **dict.fromkeys(("query", "params", "out"), MISSING),
    **dict.fromkeys(("msa", "msa_server", "msa_cache", "template", "hits", "template_structures"), None),
    **dict.fromkeys(("max_template_date", "initial_guess", "fixed_chains", "num_models", "complex", "pairs"), None),
    "seed": 0, "seeds": 1,
    **dict.fromkeys(("recycles", "recycle_tolerance", "max_recycles", "ensemble"), None),
    "dropout": False, "max_msa": None, "max_extra": None, "chain_gap": None, "relax": "none",
    "representations": None, "pair_representation": "pooled", "distogram": False, "save_recycles": False,
    "figures": True, "zip": False, "keep": None, "device": None, "chunk": None, "offload": None, "graphs": True,
    "memory": None, "precision": "auto", "batch": "auto", "workers": 1, "cluster": None, "shard": None,
    "strict": False, "force": False,
}  # fmt: skip
LEAST = {
    "num_models": 1, "seeds": 1, "recycles": 0, "recycle_tolerance": 0, "ensemble": 1, "max_msa": 1,
    "max_extra": 0, "chain_gap": 32, "chunk": 0, "workers": 1,
}  # fmt: skip
# Set to another value than the default; each alone is a valid request.
CHANGED = {
    "recycles": 5, "recycle_tolerance": 0.25, "max_recycles": "1500:3", "ensemble": 2, "dropout": True,
    "max_msa": 7, "max_extra": 0, "representations": True, "distogram": True, "save_recycles": True,
    "chain_gap": 200, "precision": "fp32",
}  # fmt: skip


def request(**changes: Any) -> Request:
    return Request(ONE, "p.npz", "out", **changes)


def identity(**changes: Any) -> dict[str, Any]:
    config = tiny_config(recycles=4, ensemble=3)
    model = Params("m", Path("m"), "0", config, SampleConfig(max_msa=9, max_extra=11))
    return request(**changes).identity_settings(model)


def test_the_defaults_and_bounds_of_a_request() -> None:
    options = {one.name: declaration(one.type)[1] for one in fields(Request)}
    assert {one.name: one.default for one in fields(Request)} == DEFAULTS
    assert {name: one.min for name, one in options.items() if one is not None and one.min is not None} == LEAST
    hidden = [name for name, one in options.items() if one is not None and not one.show_default]
    assert hidden == ["complex", "offload", "memory"]
    assert [one.name for one in fields(Request) if not one.kw_only] == ["query", "params", "out"]
    with pytest.raises(TypeError):
        Request(ONE, "p.npz", "out", None)  # type: ignore[call-arg]
    assert asdict(FoldOptions()) == {
        "recycles": None, "ensemble": None, "representations": True, "distogram": False, "logits": False,
        "save_recycles": False,
    }  # fmt: skip
    for frozen, name in ((request(), "seed"), (FoldOptions(), "recycles"), (Recycling(), "long")):
        with pytest.raises(FrozenInstanceError):
            setattr(frozen, name, None)


PLAIN = {
    "recycles": 4, "ensemble": 3, "max_msa": 9, "max_extra": 11, "precision": "auto", "representations": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {}),
        *[({name: value}, {name: value}) for name, value in CHANGED.items() if name != "max_recycles"],
        ({"max_recycles": "1500:3"}, {"max_recycles": (1500, 3)}),
        ({"recycles": 0}, {"recycles": 0}),
        ({"recycle_tolerance": 0}, {"recycle_tolerance": 0.0}),
        ({"representations": "x.store"}, {"representations": True, "stored_pair": "pooled"}),
        (
            {"representations": "x.store", "pair_representation": "whole"},
            {"representations": True, "stored_pair": "whole"},
        ),
        ({"device": "cpu", "chunk": 4, "strict": True, "seed": 3, "batch": 1, "relax": "all", "memory": "1GB"}, {}),
    ],
)
def test_the_settings_that_identify_a_run(changes: dict[str, Any], settings: dict[str, Any]) -> None:
    assert identity(**changes) == PLAIN | settings


def test_all_settings_of_a_run_together_keep_their_order() -> None:
    settings = identity(**CHANGED)
    assert settings == PLAIN | CHANGED | {"max_recycles": (1500, 3)}
    assert [*settings] == [
        *("recycles", "ensemble", "max_msa", "max_extra", "precision", "representations"),
        *("recycle_tolerance", "max_recycles", "distogram", "dropout", "save_recycles", "chain_gap"),
    ]


@pytest.mark.parametrize(
    ("most", "long"),
    [(None, None), ("1500:3", (1500, 3)), ("0:0", (0, 0)), ((12, 0), (12, 0)), ([0, 7], (0, 7))],
)
def test_max_recycles(most: Any, long: tuple[int, int] | None) -> None:
    assert Recycling.parse(0.5, most) == Recycling(0.5, long)


@pytest.mark.parametrize(
    ("most", "said"),
    [
        ("1500", "--max-recycles 1500: is not LENGTH:RECYCLES. Write two numbers, such as 1500:3."),
        ("1:2:3", "--max-recycles 1:2:3: is not"),
        ("1:x", "--max-recycles 1:x: is not"),
        ("x:1", "--max-recycles x:1: is not"),
        (":", "--max-recycles :: is not"),
        (3, "max_recycles = 3: two numbers are needed"),
        ((3,), "max_recycles = (3,): two numbers are needed"),
        ((1, 2, 3), "max_recycles = (1, 2, 3): two numbers are needed"),
        ((1.5, 2), "1.5: a whole number is needed"),
        ((1, None), "None: a whole number is needed"),
        ((-1, 2), "--max-recycles -1:2: two numbers of at least 0"),
        ((2, -1), "--max-recycles 2:-1: two numbers of at least 0"),
    ],
)
def test_wrong_max_recycles(most: Any, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as failed:
        request(max_recycles=most)
    assert isinstance(failed.value, WrongArgument) is (not isinstance(most, str) and "at least" not in said)


@pytest.mark.parametrize(
    ("recycling", "config", "recycles", "ends"),
    [
        (Recycling(), None, 9, False),
        (Recycling(), 0.5, 2, True),
        (Recycling(), 0.5, 1, False),
        (Recycling(), 0.5, None, True),
        (Recycling(0.0), 0.5, 9, False),
        (Recycling(0.5), None, 2, True),
        (Recycling(0.5), None, 0, False),
        (Recycling(0.5), 0.0, None, True),
        (Recycling(None, (9, 9)), None, 0, True),
        (Recycling(0.0, (9, 9)), None, 1, True),
    ],
)
def test_whether_recycling_may_end_early(
    recycling: Recycling, config: float | None, recycles: int | None, ends: bool
) -> None:
    assert recycling.may_end_early(tiny_config(recycles=4, recycle_tolerance=config), recycles) is ends


def test_the_passes_of_long_proteins() -> None:
    limited = Recycling(None, (10, 3))
    assert [limited.at_most(recycles, n) for n in (9, 10, 11) for recycles in (2, 3, 5)] == [2, 3, 5, 2, 3, 5, 2, 3, 3]
    assert Recycling(None, (10, 0)).at_most(5, 11) == 0
    assert Recycling().at_most(5, 10**6) == 5


def test_what_a_request_makes_of_its_options(tmp_path: Path) -> None:
    plain = request()
    assert (plain.queries, plain.params_paths, plain.alignments, plain.folder) == (
        [ONE], [Path("p.npz")], [], Path("out"),
    )  # fmt: skip
    assert (plain.part, plain.server, plain.guess, plain.fixed, plain.store) == (JobPart(1, 1), None, None, (), None)
    assert (plain.selection, plain.memory_limit, plain.kernels) == (None, None, "fast")
    assert (plain.recycling, plain.fold_options) == (Recycling(), FoldOptions(representations=False))
    assert (plain.starts_processes, plain.folds_alone, bool(plain.template_sources)) == (False, False, False)
    full = request(
        msa=["a", "b"], initial_guess="g.pdb", fixed_chains="A,B", shard="2/3", keep=2,
        memory="2GB", strict=True, recycles=2, ensemble=4, distogram=True, save_recycles=True,
        representations="r.store", recycle_tolerance=0.5, max_recycles="9:1", workers=2,
        template=["t.cif"], hits="h.hhr", template_structures="s", max_template_date="2020-01-02",
    )  # fmt: skip
    assert (full.alignments, full.guess, full.fixed) == ([Path("a"), Path("b")], Path("g.pdb"), ("A", "B"))
    assert (full.part, full.store, full.selection) == (JobPart(2, 3), Path("r.store"), 2)
    assert (full.memory_limit, full.kernels, full.recycling) == (2 * 10**9, "strict", Recycling(0.5, (9, 1)))
    assert full.fold_options == FoldOptions(2, 4, True, True, False, True)
    sources = full.template_sources
    assert (sources.files, sources.hits, sources.structures, sources.max_date) == (
        ["t.cif"], [Path("h.hhr")], Path("s"), "2020-01-02",
    )  # fmt: skip
    assert request(initial_guess="self").guess == "self"
    assert [request(representations=one).store for one in (True, False, "npz")] == [None] * 3
    assert [request(representations=one).fold_options.representations for one in (True, False, "npz")] == [
        True, False, True,
    ]  # fmt: skip
    assert [request(**one).starts_processes for one in ({"workers": 2}, {"cluster": "tcp://h:1"})] == [True, True]
    assert [request(**{one: True}).folds_alone for one in ("dropout", "save_recycles", "distogram")] == [
        True, True, False,
    ]  # fmt: skip
    # Workers get queries; everything that decides how they are folded stays.
    worker = full.for_workers()
    names = ("msa", "msa_server", "msa_cache", "template", "hits", "template_structures", "max_template_date")
    cleared: dict[str, Any] = dict.fromkeys((*names, "initial_guess", "fixed_chains"))
    assert worker == replace(full, **{"query": [], **cleared})
    assert (worker.query, worker.msa, worker.initial_guess, worker.seeds) == ([], None, None, 1)
    assert request(msa_server="https://h.org", msa_cache="c").for_workers().msa_server is None


def test_the_server_of_a_request(tmp_path: Path) -> None:
    assert server_of(None, None, tmp_path) is None
    server = AlignmentServer("https://host.org", tmp_path / "mine")
    assert server_of(server, None, tmp_path) is server
    found = [server_of("https://host.org", cache, tmp_path / "out") for cache in (None, tmp_path / "cache")]
    assert [(one.url, one.cache) for one in found if one] == [
        ("https://host.org", tmp_path / "out"),
        ("https://host.org", tmp_path / "cache"),
    ]
    asked = request(msa_server="https://host.org").server
    assert asked is not None
    assert asked.cache == Path("out/alignments")
    with pytest.raises(WrongArgument, match="a text is needed"):
        server_of(3, None, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^--msa-cache: has no effect without --msa-server"):
        server_of(None, tmp_path, tmp_path)


def test_batches_and_chains() -> None:
    assert [parse_batch(one) for one in ("auto", "1", "99999", 1, 7)] == [None, 1, 99999, 1, 7]
    wrong: Any
    for wrong in ("0", "100000", "-1", "1.5", "", "two", 0, -1, 1.5, None, True):
        with pytest.raises(WrongArgument):
            parse_batch(wrong)
    assert [parse_chains(one) for one in (None, "A", "A,B", ["A", "x"], ("B",), [])] == [
        (), ("A",), ("A", "B"), ("A", "x"), ("B",), (),
    ]  # fmt: skip
    for wrong in ("", "A,", ",", ["A", ""], [1], ["A", 1], 3, {"A": 1}):
        with pytest.raises(WrongArgument, match="names of chains are needed, such as A,B"):
            parse_chains(wrong)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seeds": 0}, "seeds = 0: at least 1 is needed"),
        ({"batch": "0"}, "--batch 0: a number from 1 on, or auto"),
        ({"pairs": "all", "complex": True}, "--pairs: it makes complexes of all records. Leave --complex out."),
        ({"memory": "lots"}, "--memory lots: not an amount"),
        ({"keep": "0"}, "--keep 0"),
        ({"representations": "x.npz"}, "--representations x.npz: the name of a store of representations ends in"),
        ({"shard": "3/2"}, "3/2"),
        ({"fixed_chains": ","}, "--fixed-chains ','"),
        (
            {"pair_representation": "whole"},
            "--pair-representation whole: is of a store. Pass --representations NAME.store too.",
        ),
        ({"pair_representation": "whole", "representations": True}, "--pair-representation whole: is of a store."),
    ],
)
def test_a_request_with_a_wrong_option_is_not_made(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        request(**changes)
    request(pairs="all", complex=False)
    request(complex=True)


@pytest.fixture
def valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the files that the requests below name into the current folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("p.npz", "q.fasta", "a.a3m", "h.hhr", "g.pdb"):
        Path(name).write_text("text")
    write_entry(Path("t.cif"), {"A": ONE}, "2020-01-01")
    for name in ("s", "taken", "done"):
        Path(name).mkdir()
    Path("taken/file").write_text("mine")
    Path("done/summary.json").write_text(json.dumps({"format": "warpfold-predictions-1", "run": "another"}))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"query": []}, "query: is empty. Name what to fold."),
        ({"params": []}, "params: is empty. Name files of parameters."),
        ({"device": "gpu"}, "--device gpu: not known. Pass cpu, cuda (an NVIDIA or AMD GPU), cuda:1 and so on, or mps"),
        *[({"device": one}, f"--device {one}: not known") for one in ("cuda:", "mps:1", "CPU", "cuda:x", "cpu:0")],
        ({"fixed_chains": "A"}, "--fixed-chains needs --initial-guess, the structure that the chains are to keep"),
        ({"pairs": "all", "initial_guess": "g.pdb"}, "--pairs: no structure of its complexes is known. Leave --in"),
        ({"msa_cache": "c"}, "--msa-cache: has no effect without --msa-server"),
        ({"hits": "h.hhr"}, "hits: need the mmCIF files that they name"),
        ({"query": "mktayiakqrqisfvksh"}, "If it is a sequence, write it in capitals"),
        ({"query": ["q.fasta", "none.fasta"]}, "none.fasta: no such file. Check the path."),
        ({"query": Path(ONE)}, f"{ONE}: no such file"),
        ({"query": "-"}, "-: nothing is piped in"),
        ({"params": ["p.npz", "none.npz"]}, "none.npz: no such file. Check the path."),
        ({"msa": ["a.a3m", "none.a3m"]}, "none.a3m: no such file. Check the path."),
        ({"hits": "none.hhr", "template_structures": "s"}, "none.hhr: no such file. Check the path."),
        ({"hits": "h.hhr", "template_structures": "none"}, "none: no such file. Check the path."),
        ({"template": "none.cif"}, "none.cif"),
        ({"initial_guess": "none.pdb"}, "none.pdb: no such file. Check the path."),
        ({"out": "taken"}, "taken: holds something else"),
        ({"out": "q.fasta"}, "q.fasta"),
        ({"cluster": "tcp://h:1"}, "--cluster tcp://h:1: needs Dask"),
    ],
)
def test_what_the_check_of_a_request_refuses(
    valid: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(query_files, "STDIN", Path("none"))
    if "cluster" in changes:
        monkeypatch.setitem(sys.modules, "distributed", None)
        monkeypatch.setitem(sys.modules, "distributed.scheduler", None)
    with pytest.raises(UserError, match=re.escape(said)):
        replace(request(), **changes).check()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *[{"device": one} for one in ("cpu", "mps", "mps:0", "cuda", "cuda:12", "xpu:3", "hpu", "mtia:2")],
        {"query": ["q.fasta", Path("q.fasta"), f"{ONE}:{ONE}"], "msa": ["a.a3m", "s"]},
        {"query": "-"},
        {"fixed_chains": "A", "initial_guess": "g.pdb"},
        {"initial_guess": "self"},
        {"pairs": "all"},
        {"template": "t.cif", "hits": ["h.hhr"], "template_structures": "s", "msa_server": "https://host.org"},
        {"out": "done"},
        {"out": "new/folder"},
        {"out": "s"},
    ],
)
def test_what_the_check_of_a_request_accepts(
    valid: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(query_files, "STDIN", Path("q.fasta"))
    before = sorted(os.listdir())
    monkeypatch.setitem(sys.modules, "distributed", None)
    replace(request(), **changes).check()
    assert sorted(os.listdir()) == before
