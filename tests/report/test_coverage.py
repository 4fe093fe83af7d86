"""Test the description of the alignment that a model receives: rows, depth per residue, rows by identity."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
