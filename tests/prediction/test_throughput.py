"""Test runs of many predictions: order, groups, shards and processes change no result."""

import errno
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import as_multimer, filled_model, random_batch, random_complex, tiny_config, tiny_model
from tests.killers import DiesTwice
from tests.prediction.runs import run_cli
from tests.ranks import run_ranks
from warpfold import predict
from warpfold.batch import Batch, stack
from warpfold.bulk import JobPart
from warpfold.data.example.raw_example import Assembly, from_sequence
from warpfold.data.features.choose import SampleConfig
from warpfold.data.formats.alignment import parse_a3m
from warpfold.errors import UserError
from warpfold.files import lock_file
from warpfold.geometry.residue import GAP
from warpfold.model.alphafold import AlphaFold, HeadsConfig
from warpfold.model.embed import MultimerConfig
from warpfold.model.template import TemplateConfig
from warpfold.parallel.execution import Execution
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import ProcessInfo, Team
from warpfold.prediction.folder import PredictionFolder, Recorder, read_records
from warpfold.prediction.folding import Clock, FoldItem, cost_of, fold_groups, in_groups, part_of
from warpfold.prediction.pages import prediction_report
from warpfold.prediction.params import read_params
from warpfold.prediction.predict import ProgressOfRun, check_processes, in_jobs
from warpfold.prediction.predictor import Predictor, Prepared
from warpfold.prediction.queries import query_of
from warpfold.prediction.request import Recycling, Request
from warpfold.progress import as_time
from warpfold.report.report import render
from warpfold.training.passes import PassPlace

SEQUENCES = ("MKTAYIAKQRQISFVKSH", "GSHMLEERLGL", "MKTAYIAKQRQIS", "GSHML", "AVRQISFVKMKTAYIAKQ", "GGSHMLEE")
FASTA = "".join(f">p{i}\n{sequence}\n" for i, sequence in enumerate(SEQUENCES))
A3M_ROWS = (("MKTAYIAKQRQISFVKSH", "MKTAYIAKQRQaaISFVK--", "-KTAYLAKQRQISFVRSH", "MKTGYLAKQRQISFVRSH"), ())
A3M = ">p0\nMKTAYIAKQRQISFVKSH\n>a\nMKTAYIAKQRQaaISFVK--\n>b\n-KTAYLAKQRQISFVRSH\n"


pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    (tmp_path / "q.fasta").write_text(FASTA)
    return tmp_path / "q.fasta"


def times_of(out: Path, names: Sequence[str]) -> dict[str, int]:
    """Return the time at which the prediction of each protein was written, in nanoseconds."""
    return {name: (out / name / f"{name}.npz").stat().st_mtime_ns for name in names}


def predictions(out: Path) -> dict[str, bytes]:
    """Read all files of the predictions, but not those of the run, which contain timings."""
    files = [path for path in sorted(out.rglob("*")) if path.is_file() and path.parent != out]
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def records(out: Path) -> dict[str, bytes]:
    return {name: data for name, data in predictions(out).items() if name.startswith("records/")}


def options(**more: Any) -> dict[str, Any]:
    return {"device": "cpu", "recycles": 0} | more


def items(params: Path, lengths: Sequence[int]) -> list[FoldItem]:
    (model,) = read_params([params])
    return [FoldItem(model, query, 0) for query in made(lengths)]


def made(lengths: Sequence[int]) -> list[Any]:
    return [query_of("A" * n, (), f"q{i}") for i, n in enumerate(lengths)]


# ---- order, groups, shards


def test_costly_ones_come_first_and_tiny_ones_together(tiny_params: Path) -> None:
    lengths = [10, 200, 30, 28, 90, 12, 11, 10]
    given = items(tiny_params, lengths)
    groups = in_groups(given, None, "cpu")
    assert [[lengths[given.index(item)] for item in group] for group in groups] == [
        [200], [90], [30, 28, 12, 11, 10, 10]
    ]  # fmt: skip
    # On a GPU the default is one protein per pass.
    assert in_groups(given, None, "cuda:1") == in_groups(given, 1, "cpu")
    assert [len(group) for group in in_groups(given, 2, "cuda")] == [1, 1, 2, 2, 2]
    assert sorted(item.key for group in groups for item in group) == sorted(item.key for item in given)


@pytest.mark.parametrize(
    ("own", "given", "recycles", "shared"),
    [
        (None, Recycling(), None, True),
        (0.5, Recycling(), None, False),
        # With one recycle, the second pass is the last one in any case.
        (0.5, Recycling(), 1, True),
        # No change is below a tolerance of 0.
        (0.5, Recycling(0.0), None, True),
        (None, Recycling(0.5), None, False),
        (None, Recycling(long=(8, 1)), None, False),
    ],
    ids=str,
)
def test_what_may_end_early_shares_no_pass(
    tiny_params: Path, own: float | None, given: Recycling, recycles: int | None, shared: bool
) -> None:
    """This holds for single chains and for complexes."""
    (model,) = read_params([tiny_params])
    for multimer in (None, MultimerConfig()):
        config = replace(model.config, recycles=3, recycle_tolerance=own, multimer=multimer)
        of = replace(model, config=config)
        queries = [query_of(["A" * 6, "G" * 4], (), f"q{i}") for i in range(2)]
        groups = in_groups([FoldItem(of, query, 0) for query in queries], 2, "cpu", given, recycles)
        assert [len(group) for group in groups] == ([2] if shared else [1, 1])


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_parts_are_a_partition_of_about_equal_cost(tiny_params: Path, count: int) -> None:
    groups = in_groups(items(tiny_params, [20 + 7 * i for i in range(40)]), None, "cpu")
    parts = [part_of(groups, JobPart(i + 1, count)) for i in range(count)]
    assert sorted(id(group) for part in parts for group in part) == sorted(map(id, groups))
    costs = [cost_of(part) for part in parts]
    assert max(costs) - min(costs) <= cost_of([groups[0]])
    jobs = list(in_jobs(groups, count))
    assert [group for job in jobs for group in job] == groups
    assert len(jobs) <= 2 * count + 1


# ---- batches equal their examples


def test_what_shares_a_pass_is_as_it_is_alone() -> None:
    """The proteins differ in length and depth. Recycling and ensembles are on; everything is computed in fp64."""
    model = tiny_model(heads=HeadsConfig(plddt_c=8, pae=True), templates=TemplateConfig(enabled=False)).double()
    predictor = Predictor(model, precision="fp64", sample=SampleConfig(max_msa=3, max_extra=2))
    deep = from_sequence(SEQUENCES[0], [parse_a3m(A3M, "p0", SEQUENCES[0])], "p0")
    examples = [deep, *(from_sequence(sequence, name=f"p{i}") for i, sequence in enumerate(SEQUENCES[1:4], 1))]
    several = [
        predictor.prepare(Assembly(one.name, ("A",), (one,)), seed=i, recycles=1, ensemble=2)
        for i, one in enumerate(examples)
    ]
    together = predictor.compute_together(several)
    for prepared, found in zip(several, together):
        alone = predictor.compute(prepared)
        for name in ("positions", "mask", "plddt", "pae", "single", "pair", "msa"):
            one, other = getattr(found, name), getattr(alone, name)
            assert one.shape == other.shape
            # Results are stored in fp32.
            np.testing.assert_allclose(one, other, rtol=2e-7, atol=1e-6, err_msg=name)
        assert found.ptm == pytest.approx(alone.ptm, abs=1e-6)
        assert found.details["together"] == 4
        kept = {"seed", "recycles", "ensemble", "msa_depth"}
        assert {key: found.details[key] for key in kept} == {key: alone.details[key] for key in kept}
    with pytest.raises(ValueError, match="same recycles"):
        predictor.compute_together([several[0], replace(several[1], recycles=0)])


@pytest.mark.parametrize("fixed", [False, True], ids=["free", "fixed"])
def test_complexes_that_share_a_pass_of_a_multimer_are_as_they_are_alone(fixed: bool) -> None:
    """The complexes differ in chains, depths and guesses. "fixed": chains are their own templates."""
    config = as_multimer(tiny_config(templates=replace(tiny_config().templates, enabled=fixed)))
    sample = SampleConfig(max_msa=3, max_extra=2, max_templates=2 if fixed else 0)
    predictor = Predictor(
        filled_model(replace(config, recycle_tolerance=0.5)).double(), precision="fp64", sample=sample
    )
    several = []
    for i, chains in enumerate([(SEQUENCES[0], "GSHML"), ("MKTAY", "GSHMLEE", "MKTAY"), ("GGSHMLEE", "MKT")]):
        query = query_of(chains, A3M_ROWS if i == 0 else (), f"c{i}")
        guess = {
            id: (np.random.default_rng(i).normal(0, 8, (len(chain), 37, 3)), np.ones((len(chain), 37)))
            for id, chain in zip(query.ids, chains)
        }
        given = {"initial_guess": guess, "fixed": ("A",)} if fixed else {}
        several.append(predictor.prepare(query.assembly, seed=i, recycles=1, ensemble=2, **given))
    assert len({one.batch["centre_rows"].shape for one in several}) > 1
    together = predictor.compute_together(several)
    for prepared, found in zip(several, together):
        alone = predictor.compute(prepared)
        for name in ("positions", "mask", "plddt", "pae", "single", "pair", "msa", "asym_id", "chain_pair_iptm"):
            one, other = getattr(found, name), getattr(alone, name)
            assert one.shape == other.shape
            # Results are stored in fp32.
            np.testing.assert_allclose(one, other, rtol=2e-7, atol=1e-6, err_msg=name)
        assert found.iptm == pytest.approx(alone.iptm, abs=1e-6)
        assert (found.details["together"], found.details["recycles"]) == (3, 1)
    with pytest.raises(ValueError, match="may end early"):
        predictor.compute_together([replace(one, recycles=2) for one in several])


def assert_each_is_as_alone(model: AlphaFold, examples: list[Batch], rows: str) -> None:
    """Check that examples folded together equal those folded alone, to 1e-10.

    rows: name of a feature of shape [..., rows, residues], from which the sizes of an example are read.
    """
    with torch.no_grad():
        together = model.fold(stack(examples), 1).unbind()
        for batch, found in zip(examples, together):
            alone = model.fold(batch, 1)
            sequences, residues = batch[rows].shape[-2:]
            first = slice(sequences), slice(residues)
            for name, part in {
                "msa": first,
                "pair": first[1:] * 2,
                "single": first[1:],
                "msa_first_row": first[1:],
            }.items():
                one, other = getattr(found.representations, name)[part], getattr(alone.representations, name)
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
            atoms = found.structure.final_atom37[:residues], alone.structure.final_atom37
            torch.testing.assert_close(*atoms, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("plan", [{}, {"chunk": 2, "in_place": True}], ids=str)
def test_the_last_pass_of_complexes_that_share_one_is_that_of_each_alone(plan: dict[str, Any]) -> None:
    """The complexes differ in chains, rows, clusters and extra rows. Some rows agree with no cluster centre."""
    model = filled_model(as_multimer(tiny_config())).double()
    Execution(Plan(**plan, precision="fp64")).bind(model)
    model.config = replace(model.config, ensemble=2)
    examples = []
    for seed, (chains, *sizes) in enumerate([((4, 3), 9, 3, 2), ((3, 2, 3), 5, 2, 3), ((5,), 7, 4, 1)]):
        one = random_complex(chains, *sizes, 2, 4, seed)
        # Rows of gaps agree with no cluster centre, so all centres share them.
        one["alignment"][-2:] = GAP
        # 20 is X, which few rows have.
        one["alignment"][-1, : chains[0]] = 20
        # Unmask the first extra row: attention whose keys are all masked would see the padding too.
        one["alignment_mask"][one["extra_rows"][:, 0]] = 1
        one["seq_mask"][:] = 1
        examples.append({name: x.double() if x.is_floating_point() else x for name, x in one.items()})
    assert_each_is_as_alone(model, examples, "bert_mask")


@pytest.mark.parametrize("plan", [{}, {"chunk": 2, "in_place": True}], ids=str)
def test_the_last_pass_of_what_shares_one_is_that_of_each_alone(plan: dict[str, Any]) -> None:
    """Compare representations and atoms, with templates, recycling and ensembles."""
    model = tiny_model().double()
    Execution(Plan(**plan, precision="fp64")).bind(model)
    model.config = replace(model.config, ensemble=2)
    examples = []
    for seed, (residues, sequences, extra, templates) in enumerate([(7, 3, 2, 2), (5, 4, 1, 1)]):
        one = random_batch(residues, sequences, extra, templates, 4, seed)
        examples.append({name: x.double() if x.is_floating_point() else x for name, x in one.items()})
    assert_each_is_as_alone(model, examples, "msa_mask")


def test_one_that_fails_in_a_group_leaves_the_others_be(
    tmp_path: Path, fasta: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = Predictor.prepare

    def failing(self: Predictor, example: Any, **more: Any) -> Prepared:
        if example.name == "p3":
            raise UserError("p3: cannot be")
        return prepare(self, example, **more)

    monkeypatch.setattr(Predictor, "prepare", failing)
    monkeypatch.setattr(Predictor, "compute_together", lambda *_: (_ for _ in ()).throw(MemoryError("no memory")))
    summary = predict(fasta, tiny_params, tmp_path / "out", **options())
    assert summary["failures"] == [{"name": "p3", "error": "p3: cannot be"}]
    assert [entry["name"] for entry in summary["predictions"]] == ["p0", "p1", "p2", "p4", "p5"]  # one by one


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_disk_ends_a_run_that_goes_on_after_what_is_one_proteins_fault(
    tmp_path: Path, fasta: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    number: int,
) -> None:  # fmt: skip
    whole, out = tmp_path / "whole", tmp_path / "out"
    command = (fasta, "--params", tiny_params, "--recycles", 0, "--batch", 1, "-q", "--out")
    assert run_cli(capsys, *command, whole)[0] == 0
    tried, save = list[str](), np.savez_compressed

    def third_fails(path: Path, **arrays: Any) -> None:
        tried.append(path.stem)
        if len(tried) >= 3:
            raise OSError(number, os.strerror(number))
        save(path, **arrays)

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez_compressed", third_fails)
        code, _, said = run_cli(capsys, *command, out)
    done = sorted(tried[:2])
    assert sorted(path.stem for path in out.rglob("p*.npz")) == done
    if number == errno.EACCES:
        assert (code, len(tried)) == (1, 6)
    else:
        assert (code, len(tried), said.count("\n")) == (2, 3, 1), said
        cure = "Make room" if number == errno.ENOSPC else "Check the disk"
        assert f"{out / tried[2]}: cannot be written: {os.strerror(number)}. {cure}. The same command con" in said
    before = times_of(out, done)
    assert run_cli(capsys, *command, out)[0] == 0
    assert times_of(out, done) == before
    assert predictions(out) == predictions(whole)


# ---- several processes


def test_parts_make_the_files_of_one_process(tmp_path: Path, fasta: Path, tiny_params: Path) -> None:
    """The files are equal to the bit. The last shard writes summary and report in the order of the query."""
    alone = predict(fasta, tiny_params, tmp_path / "alone", **options(batch=2))
    out = tmp_path / "parts"
    for number in (3, 1):
        found = predict(fasta, tiny_params, out, **options(batch=2), shard=f"{number}/3")
        assert found["status"] == "running"
        assert not (out / "report.html").exists()
    whole = predict(fasta, tiny_params, out, **options(batch=2), shard="2/3")
    assert whole == json.loads((out / "summary.json").read_text())
    assert (whole["status"], [e["name"] for e in whole["predictions"]]) == ("complete", [f"p{i}" for i in range(6)])
    assert {one["part"] for one in whole["processes"]} == {"1/3", "2/3", "3/3"}
    assert predictions(out) == predictions(tmp_path / "alone")
    assert {path.name for path in out.iterdir()} == {path.name for path in (tmp_path / "alone").iterdir()}
    assert whole["run"] == alone["run"]


def test_a_part_is_folded_by_one_process_at_a_time(
    tmp_path: Path, fasta: Path, tiny_params: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    predict(fasta, tiny_params, out, **options(), shard="1/2")
    (out / "records").mkdir(exist_ok=True)
    lock = lock_file(out / "records/part-1-of-2.lock", UserError("taken"))
    for argument, message in (("1/2", "on part 1/2"), ("1/3", "on part 1/2"), ("1/1", "on part 1/2")):
        with pytest.raises(UserError, match=f"another process is at work there {message}"):
            predict(fasta, tiny_params, out, **options(), shard=argument)
    with pytest.raises(UserError, match="another process is at work there"):
        predict(fasta, tiny_params, out, **options(seed=1, force=True))
    # Everything is predicted, but the process that holds the lock of shard 1/2 has not ended.
    second = predict(fasta, tiny_params, out, **options(), shard="2/2")
    assert second["status"] == "running"
    lock.close()
    assert predict(fasta, tiny_params, out, **options())["status"] == "complete"


@pytest.mark.slow
def test_workers_make_the_files_of_one_process(tmp_path: Path, fasta: Path, tiny_params: Path) -> None:
    predict(fasta, tiny_params, tmp_path / "alone", **options(batch=2))
    summary = predict(fasta, tiny_params, tmp_path / "two", **options(batch=2), workers=2)
    assert summary["status"] == "complete"
    assert predictions(tmp_path / "two") == predictions(tmp_path / "alone")
    with pytest.raises(UserError, match=r"--workers 2: more than --device cuda:1 has GPUs \(1\)\. Pass 1\."):
        check_processes(Request("q", "p", "out", device="cuda:1", workers=2), Team())
    with pytest.raises(UserError, match="without torchrun"):
        check_processes(Request("q", "p", "out", device="cpu", workers=2), Team(ProcessInfo(0, 2)))


@pytest.mark.slow
def test_two_workers_each_killed_once_make_the_same_files_and_nothing_twice(
    tmp_path: Path, fasta: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker dies after it has finished a job and before it reports the job."""
    predict(fasta, tiny_params, tmp_path / "alone", **options(batch=1))
    dies = DiesTwice("warpfold.prediction.predict", "fold_job", tmp_path / "killed", after=True)
    monkeypatch.setattr("warpfold.prediction.predict.fold_job", dies)
    monkeypatch.setattr("warpfold.prediction.folder.remove_records", lambda out: None)
    summary = predict(fasta, tiny_params, tmp_path / "two", **options(batch=1), workers=2)
    assert (summary["status"], dies.deaths) == ("complete", 2)
    assert predictions(tmp_path / "two") == predictions(tmp_path / "alone") | records(tmp_path / "two")
    entries = [row["entry"]["name"] for row in read_records(tmp_path / "two", summary["run"]) if "entry" in row]
    assert sorted(entries) == [f"p{i}" for i in range(6)]


def test_ranks_with_examples_of_their_own_share_the_queries(tmp_path: Path, fasta: Path, tiny_params: Path) -> None:
    predict(fasta, tiny_params, tmp_path / "alone", **options(batch=1))

    def on_a_rank() -> dict[str, Any]:
        mesh = make_mesh(2, 1)
        return predict(
            fasta, tiny_params, tmp_path / "ranks", **options(), team=Team(ProcessInfo(mesh.world.rank, 2), mesh)
        )

    first, second = run_ranks(on_a_rank, 2)
    assert first == second
    assert (first["status"], len(first["predictions"])) == ("complete", 6)
    assert predictions(tmp_path / "ranks") == predictions(tmp_path / "alone")


def test_how_many_predictions_a_query_has_is_counted_once() -> None:
    """Counting for each item would take quadratic time: a run may have 100,000 items."""
    counted: list[int] = []

    class Items(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            counted.append(1)
            return super().__iter__()

    folder = PredictionFolder(
        Path(), {}, Items([SimpleNamespace(query=SimpleNamespace(name=str(i))) for i in range(3)])
    )
    assert [folder.is_several for _ in range(3)] == [False] * 3
    assert len(counted) == 1


# ---- failures


def test_drafts_of_this_run_are_removed_and_others_stay(tmp_path: Path, fasta: Path, tiny_params: Path) -> None:
    out, given = tmp_path / "out", options(batch=1, figures=False)
    done = [entry["name"] for entry in predict(fasta, tiny_params, out, **given, shard="1/2")["predictions"]]
    left = next(name for name in (f"p{i}" for i in range(6)) if name not in done)
    own, other = (out / f".{name}.{'0' * 32}.partial" for name in (left, "somebody"))
    for folder in (own, other):
        folder.mkdir()
        (folder / "a.cif").write_text("half")
    assert predict(fasta, tiny_params, out, **given)["status"] == "complete"
    assert (own.exists(), other.exists()) == (False, True)


def test_failures_of_other_parts_stay_and_own_ones_are_tried_again(
    tmp_path: Path, fasta: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, prepare = tmp_path / "out", Predictor.prepare
    monkeypatch.setattr(Predictor, "prepare", lambda *_, **__: (_ for _ in ()).throw(UserError("no")))
    shards = ["1/2", "2/2"]
    for shard in shards:
        summary = predict(fasta, tiny_params, out, **options(batch=1), shard=shard)
    assert (summary["status"], len(summary["failures"])) == ("failed", 6)
    monkeypatch.setattr(Predictor, "prepare", prepare)
    summary = predict(fasta, tiny_params, out, **options(batch=1), shard=shards[0])
    assert (summary["status"], len(summary["predictions"]), len(summary["failures"])) == ("failed", 3, 3)
    assert predict(fasta, tiny_params, out, **options(batch=1), shard=shards[1])["status"] == "complete"


# ---- thousands


def test_many_are_begun_and_ended_at_once(tmp_path: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all steps except the model for 3,000 proteins, to exclude steps of quadratic time."""
    count = 3000
    groups = in_groups(items(tiny_params, [20 + i % 50 for i in range(count)]), 1, "cpu")
    start = time.process_time()
    assert sum(len(part_of(groups, JobPart(i, 4))) for i in range(1, 5)) == count
    assert sum(map(len, in_jobs(groups, 32))) == count
    assert time.process_time() - start < 5
    (tmp_path / "records").mkdir()
    recorder = Recorder(tmp_path, "run", None, None)
    start = time.process_time()
    for i in range(count):
        recorder.write((f"p{i}", "m", 0), {"entry": {"name": "p", "folder": "p", "files": {}}})
    rows = list(read_records(tmp_path, "run"))
    assert (len(rows), list(read_records(tmp_path, "other"))) == (count, [])
    assert time.process_time() - start < 5


# ---- progress, timings, report


def test_what_is_written_late_takes_nothing_back_of_what_was_told(tiny_params: Path) -> None:
    """The files of the first group are finished one by one while the model is near the end of the second group."""
    told: list[float] = []
    a, b, c, d = items(tiny_params, (4, 4, 5, 5))
    bar = ProgressOfRun(lambda done, total, _: told.append(done), 4, [(a, b), (c, d)])
    bar.follow((c, d), PassPlace(1, 1, 9, 10, 0.8))
    bar.move([a])
    bar.move([b])
    bar.follow((c, d), PassPlace(1, 1, 10, 10, 0.9))
    assert told == pytest.approx([0, 1.6, 1.6, 2, 3.8])


def test_waiting_is_for_features_and_for_files() -> None:
    assert Clock(computing=6.0, features=1.0, files=3.0).summary() == {
        "computing": 6.0,
        "waiting_for_features": 1.0,
        "waiting_for_files": 3.0,
        "waiting": 0.4,
    }


@pytest.mark.parametrize(("slow", "counted"), [("prepare", "features"), ("write", "files")])
def test_what_the_device_waits_for_is_counted(slow: str, counted: str) -> None:
    """The device waits for the features of the first group and for the files of the last."""
    asleep = 0.5

    def prepare(*_: Any, **__: Any) -> Any:
        time.sleep(asleep if slow == "prepare" else 0)
        return SimpleNamespace(recycles=0, ensemble=1)

    def write(*_: Any) -> dict[str, Any]:
        time.sleep(asleep if slow == "write" else 0)
        return {}

    predictor: Any = SimpleNamespace(prepare=prepare, compute=lambda *_: object())
    query = SimpleNamespace(assembly=None, guess=None, fixed=())
    item: Any = SimpleNamespace(model="m", query=query, seed=0)
    asked: Any = SimpleNamespace(recycles=0, ensemble=1)
    clock = fold_groups(lambda _: predictor, asked, Team(), [(item,)], write, lambda _: None)
    waited = clock.summary()
    assert waited[f"waiting_for_{counted}"] > 0.4 * asleep
    assert waited["waiting"] > 0.1


def test_the_report_draws_time_against_length(
    tmp_path: Path, fasta: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warpfold.prediction.pages.LENGTHS", 3)
    out = tmp_path / "out"
    told: list[tuple[int, int, str]] = []
    summary = predict(fasta, tiny_params, out, **options(), progress=lambda *at: told.append(at))
    page = render(prediction_report(out, summary))
    assert "seconds of each protein against its residues" in page
    assert "and waited" in page
    (process,) = summary["processes"]
    assert 0 <= process["waiting"] <= 1
    assert process["computing"] > 0
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert [as_time(seconds) for seconds in (3, 200, 7200)] == ["3 s", "3 min", "2.0 h"]
