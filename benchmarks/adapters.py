"""Blocks of other packages' models at their true width, for `warpfold bench --model`, with 32 to 512 residues.

    ./dev adapters esmfold                                      (once: makes the environment)
    cd benchmarks; export OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=10000
    ../.adapters/esmfold/bin/warpfold bench --model adapters:esmfold_256 --csv esmfold.csv

Each name of BLOCKS has a factory for each number of residues, as boltz_64 or openfold3_evoformer_128.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

LENGTHS = (32, 64, 128, 256, 512)
SEQUENCES = 128  # of an Evoformer block
Block = tuple[Any, tuple[tuple[Any, ...], dict[str, Any]]]  # a module, and its arguments


def esmfold(n: int) -> Block:
    """Build a block of EsmFold's trunk and its arguments."""
    import torch
    from transformers.models.esm.configuration_esm import TrunkConfig
    from transformers.models.esm.modeling_esmfold import EsmFoldTriangularSelfAttentionBlock

    block = EsmFoldTriangularSelfAttentionBlock(TrunkConfig())
    return block, ((torch.randn(1, n, 1024), torch.randn(1, n, n, 128), torch.ones(1, n, dtype=torch.int64)), {})


def openfold3(n: int) -> Block:
    """Build a block of OpenFold3's Pairformer and its arguments."""
    import torch
    from openfold3.core.model.latent.pairformer import PairFormerBlock

    single = {"c_s": 384, "c_hidden_pair_bias": 24, "no_heads_pair_bias": 16}
    block = PairFormerBlock(**single, **OPENFOLD_PAIRS, transition_type="swiglu")
    return block, ((torch.randn(1, n, 384), torch.randn(1, n, n, 128), torch.ones(1, n), torch.ones(1, n, n)), {})


def openfold3_evoformer(n: int) -> Block:
    """Build a block of OpenFold3's Evoformer, with SEQUENCES sequences, and its arguments."""
    import torch
    from openfold3.core.model.latent.evoformer import EvoformerBlock

    msa = {"c_m": 256, "c_hidden_msa_att": 32, "c_hidden_opm": 32, "no_heads_msa": 8, "msa_dropout": 0.15, "eps": 1e-3}
    block = EvoformerBlock(**msa, **OPENFOLD_PAIRS, transition_type="relu", no_column_attention=False, opm_first=False)
    m, z = torch.randn(1, SEQUENCES, n, 256), torch.randn(1, n, n, 128)
    return block, ((m, z, torch.ones(1, SEQUENCES, n), torch.ones(1, n, n)), {})


def boltz(n: int) -> Block:
    """Build a block of Boltz-2's Pairformer and its arguments."""
    import torch
    from boltz.model.layers.pairformer import PairformerLayer

    s, z = torch.randn(1, n, 384), torch.randn(1, n, n, 128)
    return PairformerLayer(384, 128, v2=True), ((s, z, torch.ones(1, n), torch.ones(1, n, n)), {})


def protenix(n: int) -> Block:
    """Build a block of Protenix's Pairformer, with torch's norms, and its arguments."""
    import torch

    os.environ["LAYERNORM_TYPE"] = "torch"  # read where the package is imported
    from protenix.model.modules.pairformer import PairformerBlock

    return PairformerBlock(), ((torch.randn(n, 384), torch.randn(n, n, 128), torch.ones(n, n)), {})


def rf3(n: int) -> Block:
    """Build a block of RoseTTAFold3's Pairformer, its attention of the sequence in fp32 as well, and its arguments."""
    import torch
    from rf3.model.layers.pairformer_layers import PairformerBlock

    triangles = {"triangle_multiplication": {"d_hidden": 128}, "triangle_attention": {"n_head": 4, "d_hidden": 32}}
    block = PairformerBlock(384, 128, 0.0, **triangles, attention_pair_bias={"n_head": 16})
    block.attention_pair_bias.force_bfloat16 = False
    return block, ((torch.randn(n, 384), torch.randn(n, n, 128)), {})


OPENFOLD_PAIRS: dict[str, Any] = {"c_z": 128, "c_hidden_mul": 128, "c_hidden_pair_att": 32, "no_heads_pair": 4}
OPENFOLD_PAIRS |= {"transition_n": 4, "pair_dropout": 0.25, "fuse_projection_weights": False, "inf": 1e9}
BLOCKS: dict[str, Callable[[int], Block]] = {
    "esmfold": esmfold,
    "boltz": boltz,
    "protenix": protenix,
    "rf3": rf3,
    "openfold3": openfold3,
    "openfold3_evoformer": openfold3_evoformer,
}


def evaluated(name: str, n: int) -> Block:
    """Build a block by name, without dropout, and its arguments for n residues."""
    block, call = BLOCKS[name](n)
    return block.eval(), call


for name in BLOCKS:
    for length in LENGTHS:
        globals()[f"{name}_{length}"] = partial(evaluated, name, length)
