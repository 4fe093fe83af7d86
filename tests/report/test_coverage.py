"""Test the description of the alignment that a model receives: rows, depth per residue, rows by identity."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import tiny_config, tiny_model
from warpfold.batch import Arrays, to_tensors
from warpfold.data.example.query_files import Complex, assemble
from warpfold.data.example.raw_example import Assembly, RawExample, from_sequence
from warpfold.data.features.choose import SampleConfig
from warpfold.data.features.make import make_features
from warpfold.data.formats.alignment import parse_a3m
from warpfold.model.embed import MultimerConfig
from warpfold.model.weights.files import save_params
from warpfold.prediction import predictor
from warpfold.prediction.predictor import load
from warpfold.prediction.read_out import Prepared, details_of
from warpfold.report.coverage import PICTURED, Coverage, coverage_of, seen_rows

QUERY = "MKTAYIAKQR"


def example(rows: list[str], query: str = QUERY) -> RawExample:
    text = f">q\n{query}\n" + "".join(f">r{i}\n{row}\n" for i, row in enumerate(rows))
    return from_sequence(query, [parse_a3m(text, "test", query)])


def coverage(assembly: Assembly) -> Coverage:
    given = assembly if len(assembly.chains) > 1 else assembly.chains[0]
    features = to_tensors(make_features(given, SampleConfig(), 0, ("x",)), widen=False)  # type: ignore[arg-type]
    return coverage_of(seen_rows(features), assembly)


def monomer(rows: list[str]) -> Assembly:
    return Assembly("q", ("A",), (example(rows),))


def test_rows_are_sorted_by_identity_and_counted() -> None:
    found = coverage(monomer(["MKTAY-----", "MKTAYIAKQA", "-----GGKQR"]))
    assert found.total == 4
    assert found.depth.tolist() == [3] * 5 + [3] * 5
    # 1 + the percentage of the query's residues that are identical in the row.
    assert found.rows.max(1).tolist() == [101, 91, 51, 31]
    assert ((found.rows > 0).sum(1)).tolist() == [10, 10, 5, 5]
    assert (found.rows[2] > 0).tolist() == [True] * 5 + [False] * 5


def test_a_query_alone_is_one_row() -> None:
    found = coverage(monomer([]))
    assert (found.total, found.depth.tolist(), found.rows.tolist()) == (1, [1] * 10, [[101] * 10])


def test_of_many_rows_some_are_pictured_and_all_are_counted() -> None:
    rng = np.random.default_rng(0)
    rows = ["".join(rng.choice(list("ACDEFGHIKL-"), 10)) for _ in range(900)]
    found = coverage(monomer(rows))
    different = len({row for row in [*rows, QUERY]})
    assert found.total == different
    assert found.rows.shape == (PICTURED, 10)
    assert (np.diff(found.rows.max(1).astype(int)) <= 0).all()
    msa = example(rows).msa
    np.testing.assert_array_equal(found.depth, (msa != 21).sum(0))


def test_pairs_of_a_complex_span_its_chains_and_other_rows_their_own() -> None:
    """Identical chains have the same rows."""
    other = "GSHMLEERL"
    one = parse_a3m(f">H\n{QUERY}\n>tr|A0A000|A0A000_MOUSE\nMKTAYIAKQA\n>alone\nMKTAY-----\n", "one", QUERY)
    two = parse_a3m(f">L\n{other}\n>tr|B0A000|B0A000_MOUSE\nGSHMLEEAA\n", "two", other)
    found = coverage(assemble(Complex("trio", ("H", "L", "x"), (QUERY, other, QUERY), (one, two)))[0])
    assert found.rows.shape == (3, 29)
    assert found.depth.tolist() == [3] * 5 + [2] * 5 + [2] * 9 + [3] * 5 + [2] * 5
    covered = [[(row[part] > 0).any() for part in (slice(0, 10), slice(10, 19), slice(19, 29))] for row in found.rows]
    assert covered == [[True, True, True], [True, True, True], [True, False, True]]
    assert found.rows.max(1).tolist() == [101, 1 + round(100 * (9 + 7 + 9) / 29), 51]


def prepared(assembly: Assembly, rows: list[str]) -> Prepared:
    """Prepare features that consist of these alignment rows, padded with an empty row."""
    codes = torch.tensor([["ARNDCQEGHILKMFPSTWYVX-".index(letter) for letter in row] for row in rows])
    codes, mask = torch.cat([codes, codes[:1]]), torch.ones(len(rows) + 1, codes.shape[1])
    mask[-1] = 0
    batch = {"alignment": codes, "alignment_mask": mask}
    return Prepared(assembly, batch, seed=3, recycles=9, ensemble=2, seconds=0.12345)


def test_the_details_of_a_complex() -> None:
    """Paired rows are counted without the query, and chains with one sequence share their rows."""
    other = "GSHMLEERL"
    one = replace(example(["MKTAYIAKQA", "MKTAY-----", "-----GGKQR"]), name="one")
    two = example(["GSHMLEEAA", "GSHML----"], other)
    trio = Assembly("trio", ("H", "L", "x"), (one, two, one))
    gap = "-" * 10
    rows = [
        f"{QUERY}{other}{QUERY}",
        f"MKTAYIAKQA{'GSHMLEEAA'}MKTAYIAKQA",
        f"MKTAY-----{'-' * 9}MKTAY-----",
        f"-----GGKQR{'-' * 9}-----GGKQR",
    ]
    given = prepared(trio, [*rows, f"{gap}GSHML----{gap}"])
    assert details_of(given, 1, 1.23456, None) == {
        "seed": 3,
        "recycles": 1,
        "ensemble": 2,
        "msa_depth": 5,
        "msa_given": 4 + 3,
        "chain_depths": {"H": 4, "L": 3, "x": 4},
        "paired_rows": 1,
        "templates": [],
        "seconds": {"features": 0.123, "model": 1.235},
    }
    # Without its rows, chain L has a warning; a chain that had none has no warning.
    alone = [rows[0], rows[2], rows[3]]
    lost = details_of(prepared(trio, alone), 1, 0, None)
    assert (lost["paired_rows"], lost["chain_depths"]) == (0, {"H": 3, "L": 1, "x": 3})
    assert [one["text"] for one in lost["warnings"]] == [
        "no row of the alignment for chain L reached the model: folded by the sequence alone"
    ]
    pair = details_of(prepared(Assembly("pair", ("H", "L"), (one, two)), [f"{QUERY}{other}"]), 1, 0, None)
    assert [one["text"] for one in pair["warnings"]] == [
        "no row of the alignment for chains H, L reached the model: folded by the sequence alone"
    ]
    single = Assembly("trio", ("H", "L", "x"), (one, example([], other), one))
    assert "warnings" not in details_of(prepared(single, alone), 1, 0, None)
    # The rows of copies are not paired.
    dimer = Assembly("dimer", ("A", "B"), (one, one))
    found = details_of(prepared(dimer, [QUERY * 2, "MKTAYIAKQA" * 2]), 1, 0, None)
    assert (found["paired_rows"], found["chain_depths"], found["msa_given"]) == (0, {"A": 2, "B": 2}, 4)


class NamedTemplates:
    """Templates of which only the names are known."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def choose(self, indices: np.ndarray) -> "NamedTemplates":
        return NamedTemplates(*(self.names[index] for index in indices))


def test_the_details_of_a_chain_name_its_templates() -> None:
    """A template of one chain comes first. The others are as many as the model takes, from each sequence once."""
    some: Any = NamedTemplates("1abc_A", "2xyz_B", "3xyz_C")
    own: Any = NamedTemplates("guess")
    one = replace(example(["MKTAYIAKQA"]), templates=some)
    chain = Assembly("q", ("A",), (one,))
    sample = SampleConfig(max_templates=2)
    found = details_of(prepared(chain, [QUERY]), 0, 0.0, sample)
    assert found["templates"] == ["1abc_A", "2xyz_B"]
    assert [one["text"] for one in found["warnings"]] == [
        "no row of the alignment reached the model: folded by the sequence alone"
    ]
    assert not {"chain_depths", "paired_rows"} & found.keys()
    assert details_of(prepared(chain, [QUERY]), 0, 0.0, None)["templates"] == []
    assert "warnings" not in details_of(prepared(chain, [QUERY, "MKTAYIAKQA"]), 0, 0.0, sample)
    dimer = Assembly("q", ("A", "B"), (one, one), fixed=(None, own))
    assert details_of(prepared(dimer, [QUERY * 2]), 0, 0.0, sample)["templates"] == ["guess", "1abc_A", "2xyz_B"]
    assert details_of(prepared(dimer, [QUERY * 2]), 0, 0.0, None)["templates"] == []
    bare = Assembly("q", ("A",), (replace(one, templates=None),))
    assert details_of(prepared(bare, [QUERY]), 0, 0.0, sample)["templates"] == []


def test_what_is_said_of_rows_is_read_from_the_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that are lost between the input and the model are never counted, and cause a warning."""
    heads = replace(tiny_config().heads, msa_classes=22)
    save_params(tmp_path / "one.safetensors", tiny_model())
    save_params(tmp_path / "many.safetensors", tiny_model(multimer=MultimerConfig(), heads=heads))
    rows = ["MKTAYIAKQA", "MKTAY-----", "-----GGKQR"]
    kept = 4

    def fewer(*args: Any, **more: Any) -> Arrays:
        features = make_features(*args, **more)
        for name in ("alignment_mask", "msa_mask", "extra_msa_mask"):
            if name in features:
                features[name][..., kept if name != "extra_msa_mask" else 0 :, :] = 0
        return features

    monkeypatch.setattr(predictor, "make_features", fewer)
    for kept in (4, 2, 1):
        for file, sequence, alignment in (("one", QUERY, rows), ("many", f"{QUERY}:{QUERY}", [rows, []])):
            folded = load(tmp_path / f"{file}.safetensors", device="cpu").fold(
                sequence, alignment, recycles=0, representations=False
            )
            assert folded.coverage is not None
            assert (folded.coverage.total, folded.coverage.depth[0]) == (kept, min(kept, 3))
            assert (folded.details["msa_depth"], folded.details["msa_given"]) == (kept, 4)
            assert set(folded.details.get("chain_depths", {"A": kept}).values()) == {kept}
            warned = [one for one in folded.details.get("warnings", ()) if one["kind"] == "rows_lost"]
            assert len(warned) == (kept == 1)
    # The terminal shows the warnings, too.
    assert len(caplog.records) == 2
