"""Test that no user data is lost: which functions may destroy files, and how every command treats existing files.

A new function that may destroy files fails the test until its author adds it to `SAFE` with the reason why it is safe.
"""

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import warpfold
from tests.helpers import tiny_model
from tests.test_cli import SEQUENCE, run, structure
from tests.training.runs import make_store, tiny_run
from warpfold.bench import kernels
from warpfold.errors import UserError
from warpfold.model.weights.files import save_params
from warpfold.training.train import train

PACKAGE = Path(warpfold.__file__).parent

OWN_DRAFT = "what it made itself, under a name that nobody else has"
OWN_FOLDER = "in a folder that was claimed: it holds a run's own names, or was empty"
SAFE = {
    "download.py:fetch_file.write_draft": "pooch's temporary file, whose name is random",
    "download.py:receive": "the caller's open, empty file",
    "prediction/published.py:fetch_params": "damaged files that this call has downloaded, and their notes",
    "files.py:remove_own": "names that a writer of stores or parts has; the folder if empty then",
    "cli/__init__.py:_make_streams_writable": "opens the null device",
    "cli/common.py:configure_output": "opens the null device",
    "bench/feeding.py:Emulation.of": "a file of 8 bytes in a temporary folder that the caller has made",
    "bench/feeding.py:Emulation.arrival": "the same file",
    "data/synthetic/folder.py:_write": OWN_DRAFT,
    "data/synthetic/folder.py:generate": OWN_DRAFT + "; `out` is absent or an empty folder, which rmdir makes sure of",
    "data/pack/part.py:PartWriter._begin": "a part's own names, in a folder that holds nothing else",
    "data/pack/part.py:PartWriter.finish": "a part's own list of jobs that were tried",
    "data/pack/match.py:Queries.read_all": "the queries of other files, in a file that begins as its own",
    "files.py:DraftFolder.complete": "renames a draft to where nothing is, and removes its own lock from it",
    "data/similar/clusters.py:_join_by_mmseqs": "in a temporary folder",
    "data/search/programs.py": "in a temporary folder",
    "data/search/server.py:AlignmentServer._exclusive": "opens to append, and appends nothing",
    "data/store/store.py:StoreWriter.__init__": "a store's own names, in a folder that holds nothing else",
    "data/store/store.py:StoreWriter.add": "a store's own names, in a folder that holds nothing else",
    "data/store/local.py:local_copy": "copies of indices, named by their contents, in a folder of its own",
    "files.py:write_new": "links a draft to where nothing is: " + OWN_DRAFT,
    "prediction/params.py:_write": "a draft of `write_new`",
    "files.py:row_file": "a file that was not there: opened only to make it",
    "files.py:lock_file": "opens to append, and appends nothing",
    "ops/triton/ahead.py:_one_at_a_time": "opens to append, and appends nothing",
    "files.py:wait_for_lock": "replaces the line in which it said who held the lock before, and no other",
    "files.py:write_atomically": "replaces one file by name, whole or not at all; callers answer for the name",
    "host.py:in_file": "a temporary file that it made and that has no name",
    "model/weights/files.py:save_params": "the file that the caller names; " + OWN_DRAFT,
    "data/load/blocks.py:_allocate": "memory that it made itself and that has no name",
    "engine/checkpoint.py:RunFolder.__enter__": "drafts of a run that was killed; " + OWN_FOLDER,
    "engine/checkpoint.py:StepFolders.prune": "a checkpoint with nothing but a checkpoint's files in it",
    "engine/checkpoint.py:StepFolders.load_latest": "renames what is damaged to a name that is free",
    "engine/checkpoint.py:RunFolder.open_log": "appends; lines of steps that are done again go; " + OWN_FOLDER,
    "engine/checkpoint.py:RunFolder.replace_file": "a run's own names; " + OWN_FOLDER,
    "engine/checkpoint.py:RunFolder.replace_file.clean": OWN_DRAFT,
    "engine/checkpoint.py:StepFolders.lock": "drafts of a run that was killed, in a folder that is locked",
    "engine/checkpoint.py:StepFolders.save": OWN_DRAFT + ", renamed where nothing is",
    "engine/checkpoint.py:RunFolder.save_failure": "a folder of its own; " + OWN_FOLDER,
    "engine/checkpoint.py:RunFolder.write_settings": OWN_FOLDER + ", and of the same settings",
    "data/store/remote.py:BlockCache.put": OWN_DRAFT,
    "data/store/remote.py:BlockCache.drop": "a copy by its name, of what lies elsewhere",
    "data/store/remote.py:BlockCache._make_room": "copies by their names, of what lies elsewhere",
    "prediction/outputs.py:clear_damaged": "what is not as it was written gets a free name; the rest is as it was",
    "files.py:append_line": "appends to a log, not through links",
    "files.py:put_aside": "renames into a folder that is new",
    "engine/trunk.py:TrunkStore.begin": "entries by their ending, in RUN/trunk; " + OWN_FOLDER,
    "engine/trunk.py:TrunkStore.write": OWN_DRAFT,
    "engine/checkpoint.py:RunFolder.write_frozen": "a run's own name; " + OWN_FOLDER,
    "training/train.py:train": "the card, a run's own name; " + OWN_FOLDER,
    "training/replay.py:replay": "RUN/.replay, a replay's own name, in which it trains; one replay of a run at a time",
    "training/replay.py:begin_folder": "the same, of a replay that was killed",
    "training/train.py:save.write": "a run's own names; " + OWN_FOLDER,
    "report/figures.py:_svg": "into memory",
    "report/figures.py:as_file": "into memory",
    "prediction/published.py:_unpack.copy": "a draft of `write_new`",
    "prediction/folder.py:PredictionFolder._remove_earlier": "records by their names, when another run takes over",
    "prediction/folder.py:_locked": "adds nothing to what is there",
    "prediction/folder.py:remove_records": "records by their names, when the summary has what they had",
    "prediction/predict.py:_fold": "moves a progress bar",
    "prediction/predict.py:_fold.record": "moves a progress bar",
    "engine/checkpoint.py:AppendedFile.__init__": "takes away a line that a kill left torn; " + OWN_FOLDER,
    "prediction/outputs.py:Prediction.save": OWN_DRAFT,
    "prediction/outputs.py:_draft": OWN_DRAFT,
    "prediction/outputs.py:_move_into": "names that were free, or files of the same prediction, asked to",
    "prediction/outputs.py:remove_drafts": OWN_DRAFT,
    "prediction/outputs.py:write_pae": OWN_DRAFT,
    "prediction/outputs.py:write_scores": OWN_DRAFT,
    "prediction/outputs.py:remove_prediction": "files of a prediction by name, and the folder if it is then empty",
    "prediction/outputs.py:drop_prediction": "the protein's folder if it is empty, after `remove_prediction`; asked to",
    "prediction/outputs.py:thin_prediction": "matrices of a prediction, by name, asked to; its arrays appear whole",
    "scoring/score_table.py:ScoreTables.append": "cuts off half a row of a table that `check_tables` knows",
    "scoring/score_table.py:remove_tables": "tables by the names that an earlier run's summary has",
    "relaxation/files.py:relax_file": "its own earlier result: `check_result` refuses files that are none",
    "prediction/folder.py:RepresentationStore.keys": "renames a finished store of this run to where nothing is",
    "prediction/folder.py:RepresentationStore.write": "finished stores of this run, when another has all of it",
    "prediction/folder.py:RepresentationStore.remove_packed": "records by their names, when the store has them",
    "prediction/folder.py:remove_copies": "copies by the names that the summary has, and their empty folder",
    "bench/ops.py:picture": "into memory",
    "cluster/folder.py": "a folder of mkdtemp's, in the one to try; that one if it made it and it is empty",
    "sequence_design/run.py:_run_start": "adds a file with the start's own name to a folder of designs",
    "cost/memory.py:without_stderr": "opens the null device",
}

WRITES = ("write_text", "write_bytes", "truncate", "ftruncate", "savez", "savez_compressed", "savefig", "save_file")
ENDS = ("rmtree", "unlink", "rmdir", "rename", "renames", "move", "copyfile", "copytree", "copy2", "removedirs")


def destroys(call: ast.Call) -> bool:
    """Return whether a call may remove or overwrite a file, judged by its name."""
    base = call.func.value if isinstance(call.func, ast.Attribute) else None
    of = base.id if isinstance(base, ast.Name) else ""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    if name in WRITES or (name in ENDS and base is not None):
        return True
    # str.replace and dataclasses.replace are harmless.
    if name == "replace":
        return of == "os" or (base is not None and len(values) == 1 and not call.keywords)
    if name in ("remove", "save", "dump"):  # list.remove is harmless
        return of in {"remove": ("os",), "save": ("np", "torch")}.get(name, ("pickle",))
    if name in ("open", "fdopen"):
        modes = [v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]
        flags = {node.attr for value in values for node in ast.walk(value) if isinstance(node, ast.Attribute)}
        return any(set(mode) <= set("rwaxbt+") and set(mode) & set("wax+") for mode in modes) or bool(
            flags & {"O_WRONLY", "O_RDWR", "O_TRUNC", "O_CREAT"}
        )
    return False


def destroyers(path: Path) -> Iterator[str]:
    """Find the functions of a file that contain such calls.  Yields their qualified names."""

    def walk(node: ast.AST, within: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call) and destroys(child):
                yield within
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            yield from walk(child, f"{within}.{child.name}".lstrip(".") if named else within)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), "")


def test_every_function_that_may_destroy_is_known() -> None:
    found = {
        f"{path.relative_to(PACKAGE).as_posix()}:{name}" for path in PACKAGE.rglob("*.py") for name in destroyers(path)
    }
    known = {name for name in found if name in SAFE or name.partition(":")[0] in SAFE}
    assert found - known == set(), "these may destroy something: think about what they meet, and add them with a reason"
    gone = {name for name in SAFE if not any(one == name or one.startswith(f"{name}:") for one in found)}
    assert gone == set(), "these destroy nothing any more: take them out"


# Existing files in the place of a command's output


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def place(kind: str, path: Path) -> None:
    """Create user data at `path`, where a command would write."""
    if kind == "folder":
        (path / "chapters").mkdir(parents=True)
        for name in ("thesis.tex", "chapters/1.tex", "metrics.jsonl", "summary.json", "search.json", "query.cif"):
            (path / name).write_text('{"step": 9}\n')
    elif kind == "file":
        path.write_text("years of work")
    elif kind == "link":
        place("folder", path.with_name("elsewhere"))
        path.symlink_to(path.with_name("elsewhere"))
    elif kind == "link to a file":
        path.with_name("thesis.tex").write_text("years of work")
        path.symlink_to(path.with_name("thesis.tex"))
    else:
        path.symlink_to(path.with_name("nowhere"))


PREDICT = "predict IN/query.fasta --params IN/tiny.safetensors --out OUT --recycles 0 --force"
GATE = "bench --op gate --shapes pair:4 --device cpu"
COMMANDS = [
    "sample --proteins 2 --out OUT",
    "pack --structures IN/one.cif --out OUT",
    "search IN/query.fasta --database IN/database.fasta --out OUT",
    PREDICT,
    "demo --out OUT --force",
    f"{GATE} --csv OUT",
    f"{GATE} --plot OUT",
    "bench --block --settings tiny --device cpu --rows OUT",
    "bench data --store IN/store --out OUT",
    "profile tiny --device cpu --out OUT",
]
KINDS = ("folder", "file", "link", "link to a file", "link to nothing")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a structure, a query, a database, parameters and a store."""
    folder = tmp_path_factory.mktemp("inputs")
    structure(folder)
    (folder / "query.fasta").write_text(f">query\n{SEQUENCE}\n")
    (folder / "database.fasta").write_text(f">a\n{SEQUENCE}\n>b\n{SEQUENCE[::-1]}\n")
    save_params(folder / "tiny.safetensors", tiny_model())
    make_store(folder / "store", proteins=3)
    return folder


def words(line: str, inputs: Path, out: Path) -> list[str]:
    """Split a command line into words, and replace IN and OUT by paths."""
    return [word.replace("IN/", f"{inputs}/").replace("OUT", str(out)) for word in line.split()]


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("line", COMMANDS)
def test_what_a_command_meets_stays(
    capsys: pytest.CaptureFixture[str], inputs: Path, tmp_path: Path, line: str, kind: str
) -> None:
    place(kind, tmp_path / "out")
    before = contents(tmp_path)
    code, _, err = run(capsys, *words(line, inputs, tmp_path / "out"))
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert contents(tmp_path) == before
    assert not [path for path in tmp_path.rglob("*") if "partial" in path.name]


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_what_a_training_run_meets_stays(inputs: Path, tmp_path: Path, kind: str) -> None:
    from warpfold.data.store.store import Store

    place(kind, tmp_path / "out")
    before = contents(tmp_path)
    with pytest.raises(UserError):
        train(tiny_run(steps=1), Store(inputs / "store"), tmp_path / "out")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_table_of_launches_meets_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kernels.file_of("A GPU")
    place(kind, path)
    before = contents(tmp_path)
    # The link is replaced, and its target is not changed.
    if kind.startswith("link"):
        with contextlib.suppress(UserError):
            kernels.write(tmp_path, {"gpu": "A GPU"}, [])
        after = contents(tmp_path)
        assert {name: after.get(name) for name in before if name != path.name} == {
            name: content for name, content in before.items() if name != path.name
        }
        return
    with pytest.raises(UserError):
        kernels.write(tmp_path, {"gpu": "A GPU"}, [])
    assert contents(tmp_path) == before


@pytest.mark.parametrize("line", [*COMMANDS[:4], COMMANDS[5]])
def test_a_place_below_a_file(capsys: pytest.CaptureFixture[str], inputs: Path, tmp_path: Path, line: str) -> None:
    """Not even root can write there."""
    (tmp_path / "thesis.tex").write_text("years of work")
    code, _, err = run(capsys, *words(line, inputs, tmp_path / "thesis.tex" / "out"))
    assert (code, err.count("\n")) == (2, 1)
    assert contents(tmp_path) == {"thesis.tex": b"years of work"}


def test_a_run_again_with_force_keeps_what_was_put_into_it(
    capsys: pytest.CaptureFixture[str], inputs: Path, tmp_path: Path
) -> None:
    arguments = words(PREDICT, inputs, tmp_path / "out")
    assert run(capsys, *arguments)[0] == 0
    (tmp_path / "out" / "query" / "notes.txt").write_text("mine")
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    assert run(capsys, *arguments, "--seed", "1")[0] == 0
    assert (tmp_path / "out" / "query" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "out" / "thesis.tex").read_text() == "mine"
    with np.load(tmp_path / "out" / "query" / "query.npz", allow_pickle=False) as arrays:
        assert len(arrays["plddt"]) == len(SEQUENCE)


def test_parameters_are_written_beside_their_place(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors.partial").write_text("mine")
    save_params(tmp_path / "a.safetensors", tiny_model())
    assert contents(tmp_path).keys() == {"a.safetensors", "a.safetensors.partial"}
    assert (tmp_path / "a.safetensors.partial").read_text() == "mine"
