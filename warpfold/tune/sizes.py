"""The sizes at which the model calls its operations, sizes for the bench, and sizes that find mistakes."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from warpfold.errors import UserError
from warpfold.model.alphafold import ModelConfig
from warpfold.model.evoformer import EvoformerConfig
from warpfold.model.pair import PairConfig
from warpfold.tune.cases import Name, OpCase

EXTRA, TEMPLATE = "extra ", "template "  # how names of layers in these stacks begin
TRIANGLES = (64, 128, 256, 384, 512, 1024, 2048)
ALIGNMENTS = ("128x256", "512x384")  # sequences x residues of initial training and of fine-tuning
DEEP = ("1024x256", "5120x384")  # of the extra MSA


@dataclass(frozen=True, kw_only=True)
class DataSizes:
    """The keys of [data] that say how large examples are (data/features/choose.py), with the same defaults."""

    crop: int | None = None
    max_msa: int = 512
    max_extra: int = 5120
    max_templates: int = 4


def of_settings(model: ModelConfig, data: DataSizes, whole: int = 256) -> list[OpCase]:
    """Return every call of an operation in the trunk, at those sizes; `whole`: residues of what is not cropped."""
    r = data.crop or whole
    templates = data.max_templates if model.templates.enabled else 0
    rows = data.max_msa + (templates if model.templates.torsion_rows else 0)
    evoformer = model.evoformer
    cases = [*_msa(rows, r, model.c_m, model.c_z, evoformer)]
    if model.extra_blocks and data.max_extra:
        extra = _msa(data.max_extra, r, model.c_e, model.c_z, evoformer)
        cases += [replace(case, where=EXTRA + case.where) for case in extra if case.where != "msa column"]
        cases += _global(data.max_extra, r, model.c_e, evoformer.heads)
    cases += _pair(r, model.c_z, evoformer.pair)
    if templates:
        t = model.templates
        cases += [replace(case, where=TEMPLATE + case.where) for case in _pair(r, t.c, t.pair)]
        sizes = {"batches": r, "keys": templates}
        cases.append(_attention("template pointwise", r * r, 1, t.heads, t.attention_width, **sizes))
    return cases


def _msa(s: int, r: int, c: int, c_z: int, config: EvoformerConfig) -> Iterator[OpCase]:
    heads = config.heads
    wide = c // heads * heads
    for where, rows, length, turned in (("msa row", s, r, False), ("msa column", r, s, True)):
        at = OpCase(op="attention", where=where, rows=rows, length=length, transposed=turned)
        yield replace(at, heads=heads, width=c // heads, bias=not turned)
        yield replace(at, op="norm_linear", channels=c, outputs=4 * wide)
        dropped = config.rate > 0 and not turned
        yield replace(at, op="tail", channels=c, outputs=wide, dropped=dropped, drawn=dropped)
    yield OpCase(op="norm_linear", where="msa row bias", rows=r, length=r, channels=c_z, outputs=heads)
    yield OpCase(op="transition", where="msa transition", rows=s, length=r, channels=c, outputs=config.transition * c)
    outer = OpCase(op="outer_product", where="outer product", rows=r, keys=r, length=s, channels=config.c_outer)
    yield replace(outer, op="norm_linear", rows=s, keys=0, length=r, channels=c, outputs=2 * config.c_outer)
    yield replace(outer, outputs=c_z)


def _global(s: int, r: int, c: int, heads: int) -> Iterator[OpCase]:
    width = c // heads
    wide, where = width * heads, "global column"
    yield _global_attention(r, s, heads, width)
    yield OpCase(op="layer_norm", where=where, rows=r, length=s, channels=c, transposed=True)
    yield OpCase(op="norm_linear", where=where, rows=r, length=s, channels=c, outputs=2 * width + wide, transposed=True)
    yield OpCase(op="tail", where=where, rows=r, length=s, channels=c, outputs=wide, transposed=True, expanded=True)


def _pair(r: int, c: int, config: PairConfig) -> Iterator[OpCase]:
    width, hidden = config.head_width or c // config.heads, config.c_triangle
    wide = width * config.heads
    at = OpCase(op="attention", where="", rows=r, length=r)
    for where, turned in (("triangle starting", False), ("triangle ending", True)):
        one = replace(at, where=where, transposed=turned)
        yield replace(one, heads=config.heads, width=width, bias=True)
        yield replace(one, op="norm_linear", channels=c, outputs=4 * wide + config.heads)
        yield replace(one, op="tail", channels=c, outputs=wide, dropped=config.rate > 0, drawn=config.rate > 0)
    yield replace(at, op="norm_linear", where="triangle product", channels=c, outputs=4 * hidden + c)
    yield replace(at, op="triangle_factor", where="triangle product", channels=hidden)
    yield replace(at, op="norm_linear", where="triangle product, out", channels=hidden, outputs=c)
    yield replace(at, op="gate", where="triangle product, out", channels=c)
    yield replace(at, op="transition", where="pair transition", channels=c, outputs=config.transition * c)


def _attention(where: str, rows: int, length: int, heads: int, width: int, **more: Any) -> OpCase:
    return OpCase(op="attention", where=where, rows=rows, length=length, heads=heads, width=width, **more)


def _global_attention(rows: int, keys: int, heads: int, width: int) -> OpCase:
    shape = OpCase(op="global_attention", where="global column", rows=rows, length=1, transposed=True)
    return replace(shape, keys=keys, heads=heads, width=width)


def _layer(op: Name, where: str, rows: int, length: int, channels: int, outputs: int = 0, **more: Any) -> OpCase:
    return OpCase(op=op, where=where, rows=rows, length=length, channels=channels, outputs=outputs, **more)


# Odd lengths, every width, rows more and fewer than a program takes, keys that are not the queries, batches.
ODD: tuple[OpCase, ...] = (
    _attention("msa row", 5, 33, 4, 32, bias=True),
    _attention("msa column", 33, 7, 2, 16, transposed=True),
    _attention("triangle starting", 65, 65, 4, 8, bias=True),
    _attention("triangle ending", 17, 17, 2, 64, bias=True, transposed=True),
    _attention("two batches", 6, 40, 2, 32, bias=True, batches=2),
    _attention("other keys", 3, 5, 2, 16, keys=131, bias=True),
    _attention("template pointwise", 25, 1, 4, 16, keys=4, batches=5),
    _attention("longer than a tile", 2, 150, 1, 32, bias=True),
    _global_attention(9, 77, 4, 8),
    _global_attention(3, 130, 8, 32),
    _layer("layer_norm", "rows", 7, 19, 128),
    _layer("layer_norm", "transposed", 5, 11, 64, transposed=True),
    _layer("layer_norm", "odd channels", 3, 5, 41),
    _layer("layer_norm", "many channels", 1, 3, 1024),
    _layer("norm_linear", "rows", 7, 19, 64, 132),
    _layer("norm_linear", "transposed", 5, 21, 128, 8, transposed=True),
    _layer("norm_linear", "odd channels", 3, 5, 24, 37),
    _layer("gate", "views of a projection", 7, 19, 24),
    _layer("gate", "transposed", 5, 131, 32, transposed=True),
    _layer("tail", "rows, dropout", 7, 19, 64, 32, dropped=True),
    _layer("tail", "transposed, dropout", 5, 33, 32, 64, transposed=True, dropped=True),
    _layer("tail", "rows", 7, 19, 64, 32, dropped=True, drawn=True),
    _layer("tail", "transposed", 5, 33, 32, 64, transposed=True, dropped=True, drawn=True),
    _layer("tail", "global column", 9, 21, 32, 32, transposed=True, expanded=True),
    _layer("tail", "odd channels", 3, 5, 24, 40),
    _layer("transition", "rows", 7, 19, 32, 128),
    _layer("transition", "odd channels", 3, 5, 24, 56),
    _layer("triangle_factor", "rows", 7, 19, 24),
    _layer("triangle_factor", "odd channels", 33, 5, 41),
    OpCase(op="outer_product", where="rows and columns", rows=9, keys=19, length=33, channels=8, outputs=24),
    OpCase(op="outer_product", where="odd channels", rows=17, keys=5, length=3, channels=7, outputs=11),
)

# For `warpfold bench --op`: the kinds of shape of each operation, and their sizes where none are named.
_ALIGNED = {"row": ALIGNMENTS, "column": ALIGNMENTS}
_PAIR = tuple(map(str, TRIANGLES[2:6]))
KINDS: dict[str, dict[str, tuple[str, ...]]] = {
    "attention": {
        **_ALIGNED,
        "global": DEEP,
        "starting": tuple(map(str, TRIANGLES)),
        "ending": tuple(map(str, TRIANGLES)),
    },
    "layer_norm": {"pair": _PAIR, "msa": ALIGNMENTS},
    "norm_linear": {"pair": _PAIR, "msa": ALIGNMENTS},
    "gate": {"pair": _PAIR},
    "tail": {"pair": _PAIR, "msa": ALIGNMENTS, "dropout": _PAIR},  # that of a pair, drawn by the operation
    "transition": {"pair": _PAIR, "msa": ALIGNMENTS},
    "triangle_factor": {"pair": _PAIR},
    "outer_product": {"msa": ALIGNMENTS},
}
QUICK = {"row": "128x256", "column": "128x256", "global": "1024x256", "msa": "128x256"}  # else 256


def shapes(op: str, wanted: Iterable[str] = (), quick: bool = False) -> list[tuple[str, OpCase]]:
    """Return cases of the bench with their names, "starting:256" or "row:128x256".

    wanted: kinds ("starting"), or kinds with sizes ("starting:256", "row:128x256"); none: all of the operation's.
    Errors: UserError for a kind that no operation has, or a size that cannot be read.
    """
    found = []
    for text in wanted:
        kind = text.partition(":")[0]
        known = sorted({k for kinds in KINDS.values() for k in kinds})
        if kind not in known:
            raise UserError(f"--shapes {text}: no such shape; there are {', '.join(known)}, as in starting:256")
    for kind, sizes in KINDS[op].items():
        chosen = [text.partition(":")[2] for text in wanted if text.partition(":")[0] == kind] if wanted else [""]
        for size in chosen:
            default = (QUICK.get(kind, "256"),) if quick else sizes
            found += [(f"{kind}:{s}", _shape(op, kind, s)) for s in ((size,) if size else default)]
    return list(dict.fromkeys(found))


def _shape(op: str, kind: str, size: str) -> OpCase:
    """Return a case with AlphaFold2's channels and heads (Supp. 1.4, 1.6) at one size."""
    match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", size)
    aligned = kind in ("row", "column", "global", "msa")
    if not match or aligned is (match[2] is None):
        expected = "SEQUENCESxRESIDUES, as in 128x256" if aligned else "one number, as in 256"
        raise UserError(f"--shapes {kind}:{size}: the size must be {expected}")
    s = int(match[1])
    r = int(match[2] or s)
    c = 256 if aligned else 128
    if kind == "row":
        return _attention("msa row", s, r, 8, 32, bias=True)
    if kind == "column":
        return _attention("msa column", r, s, 8, 32, transposed=True)
    if kind == "global":
        return _global_attention(r, s, 8, 8)
    if kind in ("starting", "ending"):
        return _attention(f"triangle {kind}", s, s, 4, 32, bias=True, transposed=kind == "ending")
    if op == "outer_product":
        return OpCase(op="outer_product", where=kind, rows=r, keys=r, length=s, channels=32, outputs=128)
    name: Name = op  # type: ignore[assignment]  # KINDS has no other
    outputs = {"norm_linear": 1024 if aligned else 516, "tail": c, "transition": 4 * c}.get(op, 0)
    drawn = kind == "dropout"
    return _layer(name, kind, s, r, c, outputs, dropped=drawn, drawn=drawn)
