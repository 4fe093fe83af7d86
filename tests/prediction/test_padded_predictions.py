"""Check in fp64 on a CPU that padding of features, as it is used on a GPU, does not change predictions."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import as_multimer, filled_model, random_batch, tiny_config
from tests.ranks import run_ranks
from warpfold.data.example.raw_example import Assembly, from_sequence
from warpfold.data.features.choose import SampleConfig
from warpfold.data.formats.alignment import parse_a3m
from warpfold.host import HostTensor
from warpfold.model import confidence
from warpfold.model.alphafold import HeadsConfig, ModelConfig
from warpfold.parallel.mesh import make_mesh
from warpfold.parallel.plan import Plan
from warpfold.parallel.team import ProcessInfo, Team
from warpfold.prediction.outputs import Prediction
from warpfold.prediction.predictor import Predictor, Prepared
from warpfold.prediction.queries import query_of
from warpfold.prediction.read_out import ReadOut
from warpfold.prediction.request import FoldOptions, Recycling

ALL = FoldOptions(representations=True, distogram=True, logits=True, save_recycles=True)
LETTERS = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRV"
MONOMER = tiny_config(heads=HeadsConfig(plddt_c=8, pae=True))
MULTIMER = as_multimer(tiny_config(recycle_tolerance=0.5))


def predictor_of(config: ModelConfig, templates: int = 0, team: Team | None = None, **plan: Any) -> Predictor:
    config = replace(config, templates=replace(config.templates, enabled=templates > 0))
    sample = SampleConfig(max_msa=5, max_extra=4, max_templates=templates)
    return Predictor(filled_model(config).double(), precision="fp64", sample=sample, team=team, **plan)


def chain(predictor: Predictor, length: int, rows: int, templates: int = 0, recycles: int = 2) -> Prepared:
    """Prepare a chain with this many random alignment rows after the query, and with random templates."""
    sequence, rng = LETTERS[:length], np.random.default_rng(length)
    drawn = ("".join(rng.choice([*LETTERS, "-"], length)) for _ in range(rows))
    a3m = "".join(f">{i}\n{row}\n" for i, row in enumerate([sequence, *drawn]))
    one = from_sequence(sequence, [parse_a3m(a3m, "q", sequence)], "q")
    prepared = predictor.prepare(Assembly("q", ("A",), (one,)), seed=1, recycles=recycles)
    if not templates:
        return prepared
    more = random_batch(residues=length, templates=templates, seed=length)
    return replace(prepared, batch=prepared.batch | {k: x for k, x in more.items() if k.startswith("template_")})


def both(predictor: Predictor, prepared: Prepared, pad_to: int) -> tuple[Prediction, Prediction]:
    """Compute the prediction with padding and without."""
    found = []
    for predictor.pad_to in (pad_to, None):
        found.append(predictor.compute(prepared, ALL))
    return found[0], found[1]


def assert_equal(padded: Prediction, expected: Prediction) -> None:
    """Compare all fields of a prediction. The distogram is stored in fp16, the other results in fp32."""
    for name in ("positions", "plddt", "mask", "pae", "single", "pair", "msa", "structure_module", "asym_id",
                 "chain_pair_iptm", "contacts", "distogram"):  # fmt: skip
        one, other = getattr(padded, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if other is not None:
            assert one.shape == other.shape, name
            limit = 1e-3 if other.dtype == np.float16 else 2e-6
            np.testing.assert_allclose(one, other, rtol=limit, atol=limit, err_msg=name)
    assert padded.logits.keys() == expected.logits.keys() >= {"plddt", "resolved", "masked_msa", "distogram", "pae"}
    for name, logits in expected.logits.items():
        assert padded.logits[name].shape == logits.shape, name
        np.testing.assert_allclose(padded.logits[name], logits, rtol=1e-5, atol=1e-5, err_msg=name)
    for name in ("ptm", "iptm", "max_pae"):
        assert getattr(padded, name) == pytest.approx(getattr(expected, name), abs=1e-6), name
    assert padded.confidences() == pytest.approx(expected.confidences(), abs=1e-4)
    assert padded.details["recycles"] == expected.details["recycles"]
    assert len(padded.recycled) == len(expected.recycled)
    for one, other in zip(padded.recycled, expected.recycled):
        np.testing.assert_allclose(one.positions, other.positions, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(one.plddt, other.plddt, rtol=2e-6, atol=2e-6)
        assert one.ptm == pytest.approx(other.ptm, abs=1e-6)


@pytest.mark.parametrize(
    "plan", [{"chunk": 0}, {"chunk": 4}, {"chunk": 3, "offload": True}], ids=["whole", "slices", "offloaded"]
)
@settings(max_examples=6, deadline=None)
@given(
    length=st.integers(1, 40), rows=st.integers(0, 12), templates=st.integers(0, 3), pad_to=st.sampled_from([2, 8, 16])
)
def test_a_padded_chain_is_predicted_as_without_padding(
    plan: dict[str, Any], length: int, rows: int, templates: int, pad_to: int
) -> None:
    predictor = predictor_of(MONOMER, templates, **plan)
    prepared = chain(predictor, length, rows, templates, recycles=1)
    assert_equal(*both(predictor, prepared, pad_to))


@pytest.mark.parametrize("plan", [{"chunk": 0}, {"chunk": 4}], ids=["whole", "slices"])
@settings(max_examples=4, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=2, max_size=3), tolerance=st.sampled_from([0.0, 0.5, 1e3]))
def test_a_padded_complex_is_predicted_as_without_padding(
    plan: dict[str, Any], lengths: list[int], tolerance: float
) -> None:
    """Recycling ends early, and the scores of chain pairs are compared too."""
    predictor = predictor_of(MULTIMER, templates=2, **plan)
    predictor.recycling = Recycling(tolerance)
    query = query_of([LETTERS[i : i + length] for i, length in enumerate(lengths)], (), "q")
    prepared = predictor.prepare(query.assembly, seed=1, recycles=3)
    assert_equal(*both(predictor, prepared, 16))


def test_a_guess_and_an_ensemble_are_padded() -> None:
    predictor = predictor_of(MONOMER)
    prepared = chain(predictor, 13, 4, recycles=0)
    guess = np.random.default_rng(0).normal(0, 8, (13, 37, 3))
    query = query_of(LETTERS[:13], (), "q")
    given = predictor.prepare(
        query.assembly, seed=1, recycles=1, ensemble=2, initial_guess={"A": (guess, np.ones((13, 37)))}
    )
    assert given.guess is not None
    for one in (prepared, given):
        assert_equal(*both(predictor, one, 16))


def test_proteins_that_share_a_pass_are_padded() -> None:
    predictor = predictor_of(MONOMER)
    several = [chain(predictor, length, rows, recycles=1) for length, rows in ((9, 5), (18, 2))]
    asked = replace(ALL, save_recycles=False)
    alone = [predictor.compute(one, asked) for one in several]
    predictor.pad_to = 16
    for one, other in zip(predictor.compute_together(several, asked), alone):
        assert_equal(one, other)


def test_a_padded_protein_is_shared_by_ranks() -> None:
    """11 residues are padded to 16 on 3 ranks, so shards end with padding or hold only padding."""

    def on_a_rank() -> Prediction:
        mesh = make_mesh(1, 3, 1)
        predictor = predictor_of(MONOMER, team=Team(ProcessInfo(mesh.world.rank, 3), mesh), chunk=4)
        predictor.pad_to = 16
        return predictor.compute(chain(predictor, 11, 3), ALL)

    padded = run_ranks(on_a_rank, 3)[0]
    predictor = predictor_of(MONOMER)
    assert_equal(padded, predictor.compute(chain(predictor, 11, 3), ALL))


@pytest.mark.parametrize("config", [MONOMER, MULTIMER, replace(MONOMER, heads=HeadsConfig(plddt_c=8))])
@pytest.mark.parametrize(
    ("plan", "pad_to"),
    [({"chunk": 0}, None), ({"chunk": 4}, 16), ({"chunk": 3, "offload": True}, 16)],
    ids=["whole", "slices", "offloaded"],
)
def test_a_prediction_has_the_outputs_of_the_heads(
    config: ModelConfig, plan: dict[str, Any], pad_to: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute the heads on whole tensors. All arrays have the sizes without padding, and are float32."""
    passes: list[Any] = []
    prediction = ReadOut.prediction

    def noting(read_out: ReadOut, prepared: Prepared, folded: Any, options: FoldOptions) -> Prediction:
        passes.append(folded)
        return prediction(read_out, prepared, folded, options)

    monkeypatch.setattr(ReadOut, "prediction", noting)
    predictor = predictor_of(config, **plan)
    predictor.pad_to = pad_to
    n, lengths = 13, (13,)
    if config.multimer is None:
        prepared = chain(predictor, n, 4, recycles=0)
    else:
        lengths = (8, 5)
        query = query_of([LETTERS[:8], LETTERS[8:13]], (), "q")
        prepared = predictor.prepare(query.assembly, seed=1, recycles=0)
    found = predictor.compute(prepared, ALL)
    model, (trunk, structure, _) = predictor.model, passes[0]
    rows = int(prepared.batch["bert_mask"].shape[-2])
    z = trunk.pair
    if isinstance(z, HostTensor):
        z = torch.cat([model.execution.fetch(trunk.pair, part) for part in model.execution.rows(trunk.pair.shape[-3])])
    half = model.distogram.half_logits(z)
    distogram = (half + half.transpose(0, 1))[:n, :n].detach()
    probabilities = distogram.softmax(-1)
    expected = {
        "single": trunk.single[:n],
        "pair": z[:n, :n],
        "msa": trunk.msa[:rows, :n],
        "structure_module": structure.single[:n],
        "positions": structure.final_atom37[:n],
        "plddt": confidence.plddt(model.plddt(structure.single[:n])),
        "distogram": probabilities,
        "contacts": probabilities[..., :19].sum(-1),
        "distogram_edges": torch.linspace(2.3125, 21.6875, 63),
    }
    logits = {
        "plddt": model.plddt(structure.single[:n]),
        "resolved": model.resolved(trunk.single[:n]),
        "masked_msa": model.masked_msa(trunk.msa[:rows, :n]),
        "distogram": distogram,
    }
    if model.pae is None:
        assert (found.pae, found.max_pae, found.ptm, found.iptm, found.chain_pair_iptm) == (None,) * 5
    else:
        logits["pae"] = model.pae(z)[:n, :n]
        errors = logits["pae"].detach().softmax(-1) * (torch.arange(64) * 0.5 + 0.25)
        expected["pae"] = errors.sum(-1)
        assert found.max_pae == 31.75
        assert found.ptm is not None
    expected |= {f"{name} logits": value for name, value in logits.items()}
    assert found.logits.keys() == logits.keys()
    halves = ("distogram", "contacts")
    for name, value in expected.items():
        one = found.logits[name.split()[0]] if name.endswith(" logits") else getattr(found, name)
        assert one.shape == value.shape, name
        assert one.dtype == (np.float16 if name in halves else np.float32), name
        limit = 2e-3 if name in halves else 2e-5
        np.testing.assert_allclose(one, value.detach().numpy(), rtol=limit, atol=limit, err_msg=name)
    assert (found.name, found.sequence, found.mask.shape) == ("q", LETTERS[:n], (n, 37))
    if len(lengths) == 1:
        assert (found.chain_ids, found.asym_id, found.iptm) == (("A",), None, None)
    else:
        assert found.asym_id is not None
        assert (found.chain_ids, found.asym_id.tolist()) == (("A", "B"), [1] * 8 + [2] * 5)
        assert found.asym_id.dtype == np.int32
        assert found.chain_pair_iptm is not None
        assert found.chain_pair_iptm.shape == (2, 2)
    # What was not requested is not there.
    names = ("single", "pair", "msa", "structure_module")
    for options in (FoldOptions(representations=False), FoldOptions(distogram=True), FoldOptions(logits=True)):
        other = predictor.compute(prepared, options)
        assert {getattr(other, name) is None for name in names} == {not options.representations}
        for name in ("distogram", "contacts", "distogram_edges"):
            assert (getattr(other, name) is None) == (not options.distogram)
        assert other.logits.keys() == (found.logits.keys() if options.logits else set())
        np.testing.assert_array_equal(other.plddt, found.plddt)
        if options.distogram:
            np.testing.assert_array_equal(other.distogram, found.distogram)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [MONOMER, MULTIMER, replace(MONOMER, heads=HeadsConfig(plddt_c=8))])
def test_a_pass_before_the_last_is_the_end_of_a_shorter_run(config: ModelConfig) -> None:
    predictor = predictor_of(config)
    found, alone = (
        predictor.compute(
            predictor.prepare(query_of([LETTERS[:8], LETTERS[8:13]], (), "q").assembly, seed=1, recycles=recycles)
            if config.multimer is not None
            else chain(predictor, 13, 4, recycles=recycles),
            FoldOptions(save_recycles=True),
        )
        for recycles in (1, 0)
    )
    (earlier,) = found.recycled
    np.testing.assert_allclose(earlier.positions, alone.positions, atol=1e-4)
    np.testing.assert_allclose(earlier.plddt, alone.plddt, atol=1e-4)
    assert (earlier.ptm, earlier.iptm) == (pytest.approx(alone.ptm), pytest.approx(alone.iptm))
    assert (earlier.ptm is None, earlier.iptm is None) == (found.ptm is None, found.iptm is None)
    assert not alone.recycled


@pytest.mark.parametrize(("ranks", "is_leader"), [(1, True), (2, True), (2, False)])
def test_large_outputs_of_ranks_are_gathered_in_files(ranks: int, is_leader: bool) -> None:
    """The first rank gets the rows of all ranks, without their padding. A single rank needs no second file."""
    asked: list[Any] = []
    whole = torch.randn(6, 5, 3)

    def gather_shards(x: torch.Tensor, axis: int, length: int, out: torch.Tensor | None = None) -> Any:
        asked.append((axis, length, None if out is None else (out.shape, out.dtype)))
        return whole if is_leader else None

    mesh = SimpleNamespace(axial=SimpleNamespace(size=ranks))
    team: Any = SimpleNamespace(mesh=mesh, is_example_leader=is_leader, gather_shards=gather_shards)
    found = ReadOut(predictor_of(MONOMER).model, team)._gathered(whole[:3].half(), 6, 5, "logits")
    shape = (torch.Size([6, 5, 3]), torch.float16)
    assert asked == [(-3, 6, shape if ranks > 1 and is_leader else None)]
    if is_leader:
        assert found is not None
        np.testing.assert_array_equal(found, whole[:5].numpy())
    else:
        assert found is None


def test_features_are_padded_on_a_gpu_alone() -> None:
    assert [Plan().multiple_on(kind) for kind in ("cuda", "cpu", "mps")] == [16, 1, 1]
    assert Plan(pad_to=1).multiple_on("cuda") == 1
    assert Plan(pad_to=8).multiple_on("cpu") == 8
    with pytest.raises(ValueError, match=r"plan\.pad_to is 0"):
        Plan(pad_to=0)
