"""The measurements of benchmarks/gpu_parts.py on a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_parts import Options, kernels, predictions, prepared, products, recorded_launches

TOY = Options(torch.device("cpu"), toy=True)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make Triton's cache empty."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_the_first_row_says_whether_the_cache_was_hit(cache: None) -> None:
    rows: list[dict[str, Any]] = []
    for _ in range(2):
        prepared(Options(torch.device("cpu"), toy=True, workers=1), lambda row: rows.append(dict(row)))
    assert [row["cache"] for row in rows[::2]] == ["miss", "hit"]
    assert [(row["hits"], row["misses"], row["failed"]) for row in rows[1::2]] == [(0, 2, []), (2, 0, [])]


def test_steps_blocks_predictions_and_checks_are_compiled_ahead() -> None:
    names = {launch.kernel.name for launch in recorded_launches(TOY)}
    # Kernels of training, the extra MSA, a block without gradients, and the optimizer
    assert {"attention_forward", "transition", "norm_linear", "sum_partials", "adam_step", "tail_backward"} <= names


def test_products_kernels_and_predictions_write_rows_that_measure_something() -> None:
    rows: dict[str, list[dict[str, Any]]] = {}
    for part in (products, kernels, predictions):
        part(TOY, lambda row, name=part.__name__: rows.setdefault(name, []).append(dict(row)))  # type: ignore[misc]
    assert not [row for row in rows["products"] if row["note"]]
    assert min(row["us"] for row in rows["products"]) > 0
    assert {row["row"][0] for row in rows["products"]} == set("13456bn")
    assert min(row["us"] for row in rows["kernels"]) > 0
    assert len({row["what"] for row in rows["kernels"]}) == 4
    assert [(row["precision"], row["recycles"]) for row in rows["predictions"]] == [
        (precision, recycles) for precision in ("fp32", "bf16") for recycles in (0, 0, 3)
    ]
    assert all(row["equals_plain"] for row in rows["predictions"] if row["recycles"])
