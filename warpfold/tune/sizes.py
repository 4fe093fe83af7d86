"""Which operations the model calls at which sizes; sizes for the bench; sizes that find mistakes."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from warpfold.errors import UserError
from warpfold.model.alphafold import ModelConfig
from warpfold.model.evoformer import EvoformerConfig
from warpfold.model.pair import PairConfig
from warpfold.tune.cases import Case, Name

EXTRA = "extra "  # of the extra MSA stack
TEMPLATE = "template "
TRIANGLES = (64, 128, 256, 384, 512, 1024, 2048)
ALIGNMENTS = ("128x256", "512x384")  # sequences x residues of initial training and of fine-tuning
DEEP = ("1024x256", "5120x384")  # of the extra MSA


@dataclass(frozen=True, kw_only=True)
class DataSizes:
    """How large examples are: these keys of [data] (data/features/choose.py), with the same defaults."""

    crop: int | None = None
    max_msa: int = 512
    max_extra: int = 5120
    max_templates: int = 4


def of_settings(model: ModelConfig, data: DataSizes, whole: int = 256) -> list[Case]:
    """Every place of the trunk that calls an operation, at those sizes; `whole`: residues where nothing is cropped."""
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
        cases.append(
            Case(
                op="attention",
                where="template pointwise",
                rows=r * r,
                batches=r,
                length=1,
                keys=templates,
                heads=t.heads,
                width=t.attention_width,
            )
        )
    return cases


def _msa(s: int, r: int, c: int, c_z: int, config: EvoformerConfig) -> Iterator[Case]:
    heads = config.heads
    wide = c // heads * heads
    for where, rows, length, turned in (("msa row", s, r, False), ("msa column", r, s, True)):
        at = Case(op="attention", where=where, rows=rows, length=length, turned=turned)
        yield replace(at, heads=heads, width=c // heads, bias=not turned)
        yield replace(at, op="norm_linear", channels=c, outputs=4 * wide)
        dropped = config.rate > 0 and not turned
        yield replace(at, op="tail", channels=c, outputs=wide, dropped=dropped, drawn=dropped)
    yield Case(op="norm_linear", where="msa row bias", rows=r, length=r, channels=c_z, outputs=heads)
    yield Case(op="transition", where="msa transition", rows=s, length=r, channels=c, outputs=config.transition * c)
    outer = Case(op="outer_product", where="outer product", rows=r, keys=r, length=s, channels=config.c_outer)
    yield replace(outer, op="norm_linear", rows=s, keys=0, length=r, channels=c, outputs=2 * config.c_outer)
    yield replace(outer, outputs=c_z)


def _global(s: int, r: int, c: int, heads: int) -> Iterator[Case]:
    width = c // heads
    wide, where = width * heads, "global column"
    yield Case(op="global_attention", where=where, rows=r, length=1, keys=s, heads=heads, width=width, turned=True)
    yield Case(op="layer_norm", where=where, rows=r, length=s, channels=c, turned=True)
    yield Case(op="norm_linear", where=where, rows=r, length=s, channels=c, outputs=2 * width + wide, turned=True)
    yield Case(op="tail", where=where, rows=r, length=s, channels=c, outputs=wide, turned=True, spread=True)


def _pair(r: int, c: int, config: PairConfig) -> Iterator[Case]:
    width, hidden = config.head_width or c // config.heads, config.c_triangle
    wide = width * config.heads
    at = Case(op="attention", where="", rows=r, length=r)
    for where, turned in (("triangle starting", False), ("triangle ending", True)):
        one = replace(at, where=where, turned=turned)
        yield replace(one, heads=config.heads, width=width, bias=True)
        yield replace(one, op="norm_linear", channels=c, outputs=4 * wide + config.heads)
        yield replace(one, op="tail", channels=c, outputs=wide, dropped=config.rate > 0, drawn=config.rate > 0)
    yield replace(at, op="norm_linear", where="triangle product", channels=c, outputs=4 * hidden + c)
    yield replace(at, op="triangle_factor", where="triangle product", channels=hidden)
    yield replace(at, op="norm_linear", where="triangle product, out", channels=hidden, outputs=c)
    yield replace(at, op="gate", where="triangle product, out", channels=c)
    yield replace(at, op="transition", where="pair transition", channels=c, outputs=config.transition * c)


def _attention(
    where: str,
    rows: int,
    length: int,
    heads: int,
    width: int,
    keys: int = 0,
    bias: bool = False,
    turned: bool = False,
    batches: int = 1,
) -> Case:
    shape = Case(op="attention", where=where, rows=rows, length=length, heads=heads, width=width)
    return replace(shape, keys=keys, bias=bias, turned=turned, batches=batches)


# Odd lengths, every width, rows more and fewer than a program takes, keys unlike queries, batches, one of everything.
ODD: tuple[Case, ...] = (
    _attention("msa row", 5, 33, 4, 32, bias=True),
    _attention("msa column", 33, 7, 2, 16, turned=True),
    _attention("triangle starting", 65, 65, 4, 8, bias=True),
    _attention("triangle ending", 17, 17, 2, 64, bias=True, turned=True),
    _attention("two batches", 6, 40, 2, 32, bias=True, batches=2),
    _attention("other keys", 3, 5, 2, 16, keys=131, bias=True),
    _attention("template pointwise", 25, 1, 4, 16, keys=4, batches=5),
    _attention("longer than a tile", 2, 150, 1, 32, bias=True),
    Case(op="global_attention", where="global column", rows=9, length=1, keys=77, heads=4, width=8, turned=True),
    Case(op="global_attention", where="global column", rows=3, length=1, keys=130, heads=8, width=32, turned=True),
    Case(op="layer_norm", where="rows", rows=7, length=19, channels=128),
    Case(op="layer_norm", where="turned", rows=5, length=11, channels=64, turned=True),
    Case(op="layer_norm", where="odd channels", rows=3, length=5, channels=41),
    Case(op="layer_norm", where="many channels", rows=1, length=3, channels=1024),
    Case(op="norm_linear", where="rows", rows=7, length=19, channels=64, outputs=132),
    Case(op="norm_linear", where="turned", rows=5, length=21, channels=128, outputs=8, turned=True),
    Case(op="norm_linear", where="odd channels", rows=3, length=5, channels=24, outputs=37),
    Case(op="gate", where="views of a projection", rows=7, length=19, channels=24),
    Case(op="gate", where="turned", rows=5, length=131, channels=32, turned=True),
    Case(op="tail", where="rows, dropout", rows=7, length=19, channels=64, outputs=32, dropped=True),
    Case(op="tail", where="turned, dropout", rows=5, length=33, channels=32, outputs=64, turned=True, dropped=True),
    Case(op="tail", where="rows", rows=7, length=19, channels=64, outputs=32, dropped=True, drawn=True),
    Case(op="tail", where="turned", rows=5, length=33, channels=32, outputs=64, turned=True, dropped=True, drawn=True),
    Case(op="tail", where="global column", rows=9, length=21, channels=32, outputs=32, turned=True, spread=True),
    Case(op="tail", where="odd channels", rows=3, length=5, channels=24, outputs=40),
    Case(op="transition", where="rows", rows=7, length=19, channels=32, outputs=128),
    Case(op="transition", where="odd channels", rows=3, length=5, channels=24, outputs=56),
    Case(op="triangle_factor", where="rows", rows=7, length=19, channels=24),
    Case(op="triangle_factor", where="odd channels", rows=33, length=5, channels=41),
    Case(op="outer_product", where="rows and columns", rows=9, keys=19, length=33, channels=8, outputs=24),
    Case(op="outer_product", where="odd channels", rows=17, keys=5, length=3, channels=7, outputs=11),
)

# Of `warpfold bench --op`: which kinds of shape each takes, and at which sizes where none are named.
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


def shapes(op: str, wanted: Iterable[str] = (), quick: bool = False) -> list[tuple[str, Case]]:
    """Cases of the bench with their names, "starting:256" or "row:128x256".

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


def _shape(op: str, kind: str, size: str) -> Case:
    """AlphaFold2's channels and heads (Supp. 1.4, 1.6) at one size."""
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
        return _attention("msa column", r, s, 8, 32, turned=True)
    if kind == "global":
        return Case(
            op="global_attention", where="global column", rows=r, length=1, keys=s, heads=8, width=8, turned=True
        )
    if kind in ("starting", "ending"):
        return _attention(f"triangle {kind}", s, s, 4, 32, bias=True, turned=kind == "ending")
    if op == "outer_product":
        return Case(op="outer_product", where=kind, rows=r, keys=r, length=s, channels=32, outputs=128)
    name: Name = op  # type: ignore[assignment]  # KINDS has no other
    outputs = {"norm_linear": 1024 if aligned else 516, "tail": c, "transition": 4 * c}.get(op, 0)
    drawn = kind == "dropout"
    return Case(op=name, where=kind, rows=s, length=r, channels=c, outputs=outputs, dropped=drawn, drawn=drawn)
