"""Test folding over ranks: one process writes the files of a single device, and no rank holds all of z."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers import tiny_model
from tests.ranks import RankError, run_ranks
from warpfold import predict
from warpfold.errors import UserError
from warpfold.model.alphafold import HeadsConfig
from warpfold.model.embed import MultimerConfig
from warpfold.model.evoformer import EvoformerConfig
from warpfold.model.weights.files import save_params
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.team import ProcessInfo, Team
from warpfold.prediction.predictor import Predictor, Prepared
from warpfold.training import planning

# SHORT has fewer residues than there are ranks.
LONG, SHORT = "MKTAYIAKQRQISFVKSHFSR", "GS"
A3M = f">long\n{LONG}\n>a\nMKTAYIAKQRQaaISFVK----L\n>b\n-KTAYLAKQRQISFVRSHFS-\n"


def folded_on_ranks(
    folder: Path, params: Path, out: Path, axial: int, branch: int = 1, **options: Any
) -> list[dict[str, Any]]:
    def on_a_rank() -> dict[str, Any]:
        mesh = make_mesh(1, axial, branch)
        team = Team(ProcessInfo(mesh.world.rank, axial * branch), mesh)
        return predict(
            folder / "q.fasta",
            params,
            out,
            msa=[folder / "long.a3m"],
            representations=True,
            device="cpu",
            team=team,
            **options,
        )

    return run_ranks(on_a_rank, axial * branch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two proteins, an alignment, parameters for both orders of layers, and the predictions of one device."""
    folder = tmp_path_factory.mktemp("predict")
    (folder / "q.fasta").write_text(f">long\n{LONG}\n>short\n{SHORT}\n")
    (folder / "long.a3m").write_text(A3M)
    for outer in ("middle", "first"):
        model = tiny_model(
            heads=HeadsConfig(plddt_c=8, pae=True), evoformer=EvoformerConfig(blocks=1, heads=4, outer=outer)
        )
        save_params(folder / f"{outer}.safetensors", model)
        predict(
            folder / "q.fasta",
            folder / f"{outer}.safetensors",
            folder / outer,
            msa=[folder / "long.a3m"],
            representations=True,
            device="cpu",
        )
    return folder


def arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


@pytest.mark.parametrize(
    ("outer", "axial", "branch", "chunk"), [("middle", 2, 1, None), ("middle", 3, 1, 4), ("first", 2, 2, 0)]
)
def test_ranks_write_the_files_of_one_device(
    folder: Path, tmp_path: Path, outer: str, axial: int, branch: int, chunk: int | None
) -> None:
    summaries = folded_on_ranks(folder, folder / f"{outer}.safetensors", tmp_path / "out", axial, branch, chunk=chunk)
    alone = json.loads((folder / outer / "summary.json").read_text())
    assert all(summary == json.loads((tmp_path / "out/summary.json").read_text()) for summary in summaries)
    assert summaries[0]["run"] == alone["run"]
    assert (summaries[0]["status"], len(summaries[0]["predictions"])) == ("complete", 2)
    files = {path.relative_to(folder / outer) for path in (folder / outer).rglob("*") if path.is_file()}
    assert {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()} == files
    for entry, entry_alone in zip(summaries[0]["predictions"], alone["predictions"]):
        assert entry["ptm"] == pytest.approx(entry_alone["ptm"], abs=2e-4)
        name = Path(entry["folder"]) / entry["files"]["arrays"]
        found, expected = arrays(tmp_path / "out" / name), arrays(folder / outer / name)
        assert found.keys() == expected.keys() >= {"pae", "pair", "msa"}
        for key, there in expected.items():
            np.testing.assert_allclose(found[key], there, rtol=1e-3, atol=1e-3, err_msg=key)


def test_the_grid_of_a_prediction_counts_every_protein_and_seed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two proteins with two seeds are four predictions, shared out to two ranks that no plan was given."""
    counts: list[int] = []
    choose = planning.choose

    def counting(*args: Any, **options: Any) -> Any:
        counts.extend([options["examples"]] if "examples" in options else [])
        return choose(*args, **options)

    monkeypatch.setattr(planning, "choose", counting)

    def on_a_rank() -> tuple[dict[str, Any], list[int]]:
        mesh = make_mesh(2)
        team = Team(ProcessInfo(mesh.world.rank, 2), mesh)
        options: dict[str, Any] = {"seeds": 2, "figures": False, "device": "cpu", "team": team}
        return predict(folder / "q.fasta", folder / "middle.safetensors", tmp_path / "out", **options), counts

    (summary, first), (_, second) = run_ranks(on_a_rank, 2)
    assert (first, second) == ([4], [])
    assert [entry["seed"] for entry in summary["predictions"]].count(1) == 2
    assert len(summary["predictions"]) == 4


def test_a_complex_on_ranks_has_the_scores_of_one_device(tmp_path: Path) -> None:
    """Two seeds are ranked, and one rank writes all files."""
    heads = HeadsConfig(plddt_c=8, pae=True, msa_classes=22)
    save_params(tmp_path / "params.safetensors", tiny_model(multimer=MultimerConfig(), heads=heads))
    (tmp_path / "dimer.fasta").write_text(f">H\n{LONG}\n>L\nGSHMLEERLGL\n")
    query, params = tmp_path / "dimer.fasta", tmp_path / "params.safetensors"

    def fold(out: Path, team: Team | None = None) -> dict[str, Any]:
        return predict(query, params, out, device="cpu", recycles=0, seeds=2, team=team)

    def on_a_rank() -> dict[str, Any]:
        mesh = make_mesh(1, 2)
        return fold(tmp_path / "ranks", Team(ProcessInfo(mesh.world.rank, 2), mesh))

    alone, (first, second) = fold(tmp_path / "alone"), run_ranks(on_a_rank, 2)
    assert first == second == json.loads((tmp_path / "ranks/summary.json").read_text())
    assert first["run"] == alone["run"]
    for found, expected in zip(*(sorted(s["predictions"], key=lambda e: e["seed"]) for s in (first, alone))):
        for score in ("iptm", "ptm", "ranking_confidence"):
            assert found[score] == pytest.approx(expected[score], abs=2e-4)
        np.testing.assert_allclose(found["chain_pair_iptm"], expected["chain_pair_iptm"], atol=2e-4)
        assert (tmp_path / "ranks" / found["ranked"]["mmcif"]).is_file()


class Shapes(TorchDispatchMode):
    """Record the shapes of all tensors that are created within this context."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(x.shape) for x in tree_leaves(out) if isinstance(x, Tensor)}
        return out


def test_no_rank_holds_a_whole_pair_tensor() -> None:
    """At no time does a rank hold all rows of z, of the distogram logits or of the PAE logits."""
    n = len(LONG)

    def whole(axial: int) -> list[tuple[int, ...]]:
        mesh = make_mesh(1, axial)
        model = tiny_model(c_z=9, heads=HeadsConfig(plddt_c=8, pae=True))
        predictor = Predictor(model, team=Team(ProcessInfo(mesh.world.rank, axial), mesh))
        with Shapes() as seen:
            predictor.fold(LONG, representations=False)
        wide = {9, 64}  # channels: z, heads
        return sorted(
            shape for shape in seen.shapes if len(shape) >= 3 and shape[-3:-1] == (n, n) and shape[-1] in wide
        )

    assert whole(1)
    assert run_ranks(lambda: whole(3), 3) == [[]] * 3


def test_from_python_the_first_rank_has_what_a_prediction_holds() -> None:
    """Logits are gathered on the first rank. With `fold_many`, only the first rank has the predictions.

    All ranks have the errors.
    """

    def fold(axial: int) -> tuple[dict[str, Any], list[bool], list[str]]:
        mesh = make_mesh(1, axial)
        predictor = Predictor(tiny_model(recycles=0), team=Team(ProcessInfo(mesh.world.rank, axial), mesh))
        logits = predictor.fold(LONG, logits=True, distogram=True).logits
        many = predictor.fold_many([LONG, "MK*", LONG[:20]])
        held, failed = [one.prediction is not None for one in many], [one.error[:7] for one in many]
        return {name: np.array(array) for name, array in logits.items()}, held, failed

    alone, (first, second) = fold(1)[0], run_ranks(lambda: fold(2), 2)
    assert first[0].keys() == alone.keys()
    assert {"plddt", "resolved"} <= second[0].keys() < alone.keys()
    for name, array in first[0].items():
        # The shapes of the matrix products differ, and so does their rounding.
        np.testing.assert_allclose(array, alone[name], rtol=1e-3, atol=1e-3)
    assert (first[1], second[1]) == ([True, False, True], [False] * 3)
    assert first[2] == second[2] == ["", "query_2", ""]


def test_bad_input_is_one_proteins_failure_on_all_ranks_and_trouble_is_the_end(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold = Predictor.compute

    def refused(self: Predictor, prepared: Prepared, *args: Any) -> Any:
        if prepared.assembly.name == "long":
            raise UserError("long: cannot be folded")
        return fold(self, prepared, *args)

    monkeypatch.setattr(Predictor, "compute", refused)
    summaries = folded_on_ranks(folder, folder / "middle.safetensors", tmp_path / "out", 2)
    assert [s["failures"] for s in summaries] == [[{"name": "long", "error": "long: cannot be folded"}]] * 2
    assert [entry["name"] for entry in summaries[1]["predictions"]] == ["short"]

    def short_of_memory(self: Predictor, *args: Any, **more: Any) -> Any:
        if self.team.process.rank == 1:
            raise MemoryError("no memory")
        return fold(self, *args, **more)

    monkeypatch.setattr(Predictor, "compute", short_of_memory)
    with pytest.raises(RankError, match="no memory"):
        folded_on_ranks(folder, folder / "middle.safetensors", tmp_path / "other", 2)
    monkeypatch.setattr(Predictor, "compute", fold)
    # The same command continues the run.
    summaries = folded_on_ranks(folder, folder / "middle.safetensors", tmp_path / "other", 2)
    assert [summary["status"] for summary in summaries] == ["complete"] * 2


def test_branches_need_halves_that_are_independent(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"plan.branch = 2 needs blocks with independent halves"):
        folded_on_ranks(folder, folder / "middle.safetensors", tmp_path / "out", 1, 2)
    assert not (tmp_path / "out").exists()
