"""The page of accelerate: every block runs, each by itself; one that needs a package is skipped without it."""

import ast
import importlib.util

import pytest
import torch

from tests.test_docs import ROOT, blocks

BLOCKS = blocks(ROOT / "docs" / "accelerate.md", "python")


def packages(block: str) -> set[str]:
    """Return the packages that a block imports."""
    nodes = list(ast.walk(ast.parse(block)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.partition(".")[0] for name in plain | {str(n.module) for n in nodes if isinstance(n, ast.ImportFrom)}}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: "-".join(sorted(packages(block) - {"torch", "warpfold"})))
def test_blocks_run(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpfold.adapt.accelerate.keep_memory", lambda: None)
    if missing := [name for name in sorted(packages(block)) if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{missing[0]} is not installed: ./dev adapters")
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(block, "accelerate.md", "exec"), names)
    assert len(names) > 2


def test_there_is_a_block_for_every_kind_of_user() -> None:
    assert {"transformers", "boltz", "openfold3"} <= set().union(*map(packages, BLOCKS))
    assert sum(packages(block) <= {"torch", "warpfold"} for block in BLOCKS) == 3
