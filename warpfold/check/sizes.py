"""Sizes at which the model calls its operations, and sizes for benchmarks."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from warpfold.check.cases import BENCHED, PROFILES
from warpfold.check.op_profile import LayerSizes, OpCase
from warpfold.errors import UserError
from warpfold.model.alphafold import ModelConfig
from warpfold.model.axial import PLAIN
from warpfold.model.evoformer import EvoformerConfig, PairConfig

# Prefixes of the names of layers in these stacks.
EXTRA, TEMPLATE = "extra ", "template "


@dataclass(frozen=True, kw_only=True)
class DataSizes:
    """The keys of [data] that determine the sizes of examples (data/features/choose.py), with the same defaults."""

    crop: int | None = None
    max_msa: int = 512
    max_extra: int = 5120
    max_templates: int = 4


# Residues if the settings do not crop.
UNCROPPED = 256


def of_settings(model: ModelConfig, data: DataSizes) -> list[OpCase]:
    """List every call of an operation in the trunk at the sizes of the settings."""
    cases = (profile.case(layer) for layer in layers(model, data) for profile in PROFILES.values())
    return [case for case in cases if case is not None]


def layers(model: ModelConfig, data: DataSizes) -> Iterator[LayerSizes]:
    """Yield each kind of layer once at the sizes of the settings."""
    r = data.crop or UNCROPPED
    t = model.templates
    templates = data.max_templates if t.enabled else 0
    rows = data.max_msa + (templates if t.torsion_rows else 0)
    yield from _msa(rows, r, model.c_m, model.c_z, model.evoformer)
    if model.extra_blocks and data.max_extra:
        for layer in _msa(data.max_extra, r, model.c_e, model.c_z, model.evoformer):
            # The extra MSA stack has global attention instead of column attention.
            if layer.name != "msa column":
                yield replace(layer, name=EXTRA + layer.name)
        heads = model.evoformer.heads
        width, c = model.c_e // heads, model.c_e
        at = LayerSizes(kind="global attention", name="global column", rows=r, length=data.max_extra, transposed=True)
        yield replace(at, channels=c, projected=2 * width + heads * width, heads=heads, width=width)
    yield from _pair(r, model.c_z, model.evoformer.pair)
    if templates:
        together = PLAIN.parts(templates, r * r)[0].stop
        for layer in _pair(r, t.c, t.pair):
            yield replace(layer, name=TEMPLATE + layer.name, rows=together * r, batches=together)
    # FAPE of backbones in every layer of the structure module, and of side chains in the last one.
    yield LayerSizes(kind="fape", name="backbone", rows=r, length=r, batches=model.structure.layers)
    yield LayerSizes(kind="fape", name="side chains", rows=8 * r, length=14 * r)
    yield LayerSizes(kind="clashes", name="clashes", rows=1, length=14 * r)
    # A multimer averages its templates instead.
    if templates and model.multimer is None:
        at = LayerSizes(kind="pointwise attention", name="template pointwise", rows=r * r, length=1, keys=templates)
        yield replace(at, heads=t.heads, width=t.attention_width, batches=r)


def _msa(s: int, r: int, c: int, c_z: int, config: EvoformerConfig) -> Iterator[LayerSizes]:
    h, hidden = config.heads, config.c_outer
    width = c // h
    row = LayerSizes(kind="attention", name="msa row", rows=s, length=r, channels=c, projected=4 * h * width)
    row = replace(row, heads=h, width=width, bias=True, dropped=config.rate > 0)
    yield row
    yield replace(row, name="msa column", rows=r, length=s, bias=False, dropped=False, transposed=True)
    yield LayerSizes(kind="projection", name="msa row bias", rows=r, length=r, channels=c_z, projected=h)
    at = LayerSizes(kind="transition", name="msa transition", rows=s, length=r, channels=c)
    yield replace(at, hidden=config.transition * c, gated=config.activation == "swiglu")
    yield replace(at, kind="outer product", name="outer product", projected=2 * hidden, hidden=hidden, outputs=c_z)


def _pair(r: int, c: int, config: PairConfig) -> Iterator[LayerSizes]:
    h, width, hidden = config.heads, config.head_width or c // config.heads, config.c_triangle
    starting = LayerSizes(kind="attention", name="triangle starting", rows=r, length=r, channels=c, bias=True)
    starting = replace(starting, projected=4 * h * width + h, heads=h, width=width, dropped=config.rate > 0)
    yield starting
    yield replace(starting, name="triangle ending", transposed=True)
    at = LayerSizes(kind="triangle product", name="triangle product", rows=r, length=r, channels=c)
    yield replace(at, projected=4 * hidden + c, hidden=hidden, dropped=config.rate > 0)
    yield replace(at, kind="triangle output", name="triangle product, out", channels=hidden, projected=c)
    gated = config.activation == "swiglu"
    yield replace(at, kind="transition", name="pair transition", hidden=config.transition * c, gated=gated)


# Sizes of `warpfold bench --op --quick`. Other kinds of shape use 256.
QUICK = {"row": "128x256", "column": "128x256", "global": "1024x256", "msa": "128x256"}


def shapes(op: str, wanted: Iterable[str] = (), quick: bool = False) -> list[tuple[str, OpCase]]:
    """List benchmark cases with their names, such as "starting:256" or "row:128x256".

    wanted: kinds ("starting"), or kinds with sizes ("starting:256", "row:128x256"); empty for all of the operation's.
    Raises UserError for an unknown kind or an invalid size.
    """
    cases = []
    for text in wanted:
        kind = text.partition(":")[0]
        kinds = sorted({kind for name in BENCHED for kind in PROFILES[name].kinds})
        if kind not in kinds:
            raise UserError(f"--shapes {text}: no such shape. Pass one of {', '.join(kinds)}, as in starting:256.")
    for kind, sizes in PROFILES[op].kinds.items():
        selected_sizes = (
            [text.partition(":")[2] for text in wanted if text.partition(":")[0] == kind] if wanted else [""]
        )
        for size in selected_sizes:
            default = (QUICK.get(kind, "256"),) if quick else sizes
            cases += [(f"{kind}:{s}", _shape(op, kind, s)) for s in ((size,) if size else default)]
    return list(dict.fromkeys(cases))


def _shape(op: str, kind: str, size: str) -> OpCase:
    """Create a case with AlphaFold2's channels and heads (Supp. 1.4, 1.6) at one size."""
    match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", size)
    aligned = kind in ("row", "column", "global", "msa")
    if not match or aligned is (match[2] is None):
        expected = "SEQUENCESxRESIDUES, as in 128x256" if aligned else "one number, as in 256"
        raise UserError(f"--shapes {kind}:{size}: the size must be {expected}")
    s = int(match[1])
    return PROFILES[op].example(kind, s, int(match[2] or s))
