"""Outside the trunk's layers too: what is computed in slices is what is computed at once, and little more than z exists.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.helpers import as_multimer, filled_model, random_batch, random_complex, tiny_config
from warpfold.batch import Batch
from warpfold.host import fetch
from warpfold.model.alphafold import AlphaFold
from warpfold.parallel.execution import Execution
from warpfold.parallel.plan import Plan

LIMIT = 1e-10  # relative; TARGETS "Exactness"
CHAINS = (5, 4)


def example(templates: int, several: bool) -> Batch:
    """A protein or a complex of 9 residues, of which the last and the last template are masked, in fp64."""
    size = 5, 6, templates
    batch = random_complex(CHAINS, 13, *size, 1, 0) if several else random_batch(9, *size, 1, 0)
    batch["seq_mask"][-1:] = 0
    if templates > 1:
        batch["template_mask"][-1:] = 0
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


def model_of(several: bool) -> AlphaFold:
    config = tiny_config()
    return filled_model(as_multimer(config, False) if several else config).double().eval()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("several", [False, True], ids=["chain", "complex"])
@pytest.mark.parametrize("templates", [0, 1, 4])
def test_in_place_is_whole(several: bool, templates: int) -> None:
    batch, model = example(templates, several), model_of(several)
    with torch.no_grad():
        whole = Execution(Plan(precision="fp64")).bind(model)(batch, 1)
        for plan in (Plan(chunk=1), Plan(chunk=4), Plan(chunk=4, offload=True)):
            Execution(replace(plan, in_place=True, precision="fp64")).bind(model)
            found = model.fold(batch, 1)
            pair, atoms = fetch(found.representations.pair, slice(0, 9)), found.structure.final_atom37
            assert error(pair, whole.pair) < LIMIT and error(atoms, whole.structure.final_atom37) < LIMIT
