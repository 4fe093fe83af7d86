"""A block of somebody else's model, true width, by its own code and by ours in turns: seconds and peak memory.

    ./dev adapters esmfold                                      (once: makes the environment)
    .adapters/esmfold/bin/python benchmarks/adapters.py esmfold --out benchmarks/results/NAME.json

Ratios only: times of one run, a forward pass without gradient and both passes.  Memory is kept for both
(`warpfold.device.keep_memory`), threads wait as `./dev` has them wait.  The peak is of what torch's allocator gives.
"""

import argparse
import copy
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAITS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}  # as the command line has it
LENGTHS = (32, 64, 128, 256)
SEQUENCES = 128  # of an Evoformer block


def esmfold(n: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a block of EsmFold's trunk and its arguments."""
    import torch
    from transformers.models.esm.configuration_esm import TrunkConfig
    from transformers.models.esm.modeling_esmfold import EsmFoldTriangularSelfAttentionBlock

    block = EsmFoldTriangularSelfAttentionBlock(TrunkConfig())
    return block, (torch.randn(1, n, 1024), torch.randn(1, n, n, 128), torch.ones(1, n, dtype=torch.int64)), {}


def openfold3(n: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a block of OpenFold3's Pairformer and its arguments."""
    import torch
    from openfold3.core.model.latent.pairformer import PairFormerBlock

    single = {"c_s": 384, "c_hidden_pair_bias": 24, "no_heads_pair_bias": 16}
    block = PairFormerBlock(**single, **OPENFOLD_PAIRS, transition_type="swiglu")
    return block, (torch.randn(1, n, 384), torch.randn(1, n, n, 128), torch.ones(1, n), torch.ones(1, n, n)), {}


def openfold3_evoformer(n: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a block of OpenFold3's Evoformer, with SEQUENCES sequences, and its arguments."""
    import torch
    from openfold3.core.model.latent.evoformer import EvoformerBlock

    msa = {"c_m": 256, "c_hidden_msa_att": 32, "c_hidden_opm": 32, "no_heads_msa": 8, "msa_dropout": 0.15, "eps": 1e-3}
    block = EvoformerBlock(**msa, **OPENFOLD_PAIRS, transition_type="relu", no_column_attention=False, opm_first=False)
    m, z = torch.randn(1, SEQUENCES, n, 256), torch.randn(1, n, n, 128)
    return block, (m, z, torch.ones(1, SEQUENCES, n), torch.ones(1, n, n)), {}


def boltz(n: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a block of Boltz-2's Pairformer and its arguments."""
    import torch
    from boltz.model.layers.pairformer import PairformerLayer

    s, z = torch.randn(1, n, 384), torch.randn(1, n, n, 128)
    return PairformerLayer(384, 128, v2=True), (s, z, torch.ones(1, n), torch.ones(1, n, n)), {}


def protenix(n: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a block of Protenix's Pairformer, with torch's norms, and its arguments."""
    import torch

    os.environ["LAYERNORM_TYPE"] = "torch"  # read where the package is imported
    from protenix.model.modules.pairformer import PairformerBlock

    return PairformerBlock(), (torch.randn(n, 384), torch.randn(n, n, 128), torch.ones(n, n)), {}


def rf3(n: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a block of RoseTTAFold3's Pairformer, its attention of the sequence in fp32 as well, and its arguments."""
    import torch
    from rf3.model.layers.pairformer_layers import PairformerBlock

    triangles = {"triangle_multiplication": {"d_hidden": 128}, "triangle_attention": {"n_head": 4, "d_hidden": 32}}
    block = PairformerBlock(384, 128, 0.0, **triangles, attention_pair_bias={"n_head": 16})
    block.attention_pair_bias.force_bfloat16 = False
    return block, (torch.randn(n, 384), torch.randn(n, n, 128)), {}


OPENFOLD_PAIRS: dict[str, Any] = {"c_z": 128, "c_hidden_mul": 128, "c_hidden_pair_att": 32, "no_heads_pair": 4}
OPENFOLD_PAIRS |= {"transition_n": 4, "pair_dropout": 0.25, "fuse_projection_weights": False, "inf": 1e9}
BLOCKS: dict[str, Callable[[int], tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "esmfold": esmfold,
    "boltz": boltz,
    "protenix": protenix,
    "rf3": rf3,
    "openfold3": openfold3,
    "openfold3-evoformer": openfold3_evoformer,
}


def compare(make: Callable[[int], tuple[Any, tuple[Any, ...], dict[str, Any]]], n: int, repeats: int) -> dict[str, Any]:
    """Return the seconds and peaks of both ways for n residues, and how many times as fast ours is."""
    import torch

    from warpfold.adapt.accelerate import accelerate
    from warpfold.adapt.verify import redrawn
    from warpfold.bench.timing import Subject, measure

    torch.manual_seed(0)
    theirs, args, kwargs = make(n)
    redrawn(theirs.eval(), 0)
    ours = accelerate(copy.deepcopy(theirs), verify=False)
    tensors = [x for x in (*args, *kwargs.values()) if torch.is_tensor(x) and x.is_floating_point()]
    given = [x.requires_grad_() for x in tensors if not (x == 1).all()]  # no masks
    subjects = []
    for name, block in (("theirs", theirs), ("ours", ours)):
        wanted = [*given, *block.parameters()]
        grad = tuple(torch.randn_like(x) for x in _outputs(block(*args, **kwargs)))
        subjects.append(Subject(name, lambda block=block: _outputs(block(*args, **kwargs)), wanted, grad))
    found = measure(subjects, torch.device("cpu"), repeats, budget=1e9)
    figures: dict[str, Any] = {"n": n}
    for name, times in found.items():
        if times.failed:
            raise RuntimeError(f"{name}: {times.failed}")
        forward, both = times.median("forward"), times.median("training", "backward")
        assert forward is not None
        assert both is not None
        figures[name] = {"forward": round(forward, 4), "both": round(both, 4)}
        figures[name] |= {f"{which}_mib": times.peaks.get(which, 0) >> 20 for which in ("forward", "both")}
    theirs_took, ours_took = figures["theirs"], figures["ours"]
    figures["times as fast"] = {key: round(theirs_took[key] / ours_took[key], 2) for key in ("forward", "both")}
    figures["peak, ours of theirs"] = round(ours_took["both_mib"] / max(theirs_took["both_mib"], 1), 2)
    return figures


def _outputs(found: Any) -> tuple[Any, ...]:
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(BLOCKS))
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="residues, as 64,256")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    arguments = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in WAITS.items()):  # read when torch is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **WAITS})
    import torch

    from warpfold.device import keep_memory

    keep_memory()
    results = []
    for n in map(int, arguments.lengths.split(",")):
        results.append(compare(BLOCKS[arguments.name], n, arguments.repeats))
        print(json.dumps(results[-1]), flush=True)
    report = {
        "what": f"a block of {arguments.name}, true width, fp32",
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "results": results,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
