"""Draw the charts of a prediction as SVG: pLDDT, PAE, alignment coverage and the Cα trace.

Each chart states its plot area (`data-box`, in the units of its view box), from which the page's script computes the
residue under the mouse pointer. Colours that light and dark pages share are defined here; the others are in report.css.
"""

import base64
import html
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# The four pLDDT classes of AlphaFold DB (https://alphafold.ebi.ac.uk): lower bound, colour, name.
CLASSES = (
    (90.0, "#0053D6", "very high"),
    (70.0, "#65CBF3", "high"),
    (50.0, "#FFDB13", "low"),
    (-1.0, "#FF7D45", "very low"),
)

# Colours of chains and models: the palette of Okabe and Ito (https://jfly.uni-koeln.de/color/), which colour-blind
# readers can distinguish. The colours least similar to those of pLDDT come first.
CHAIN_COLORS = ("#009e73", "#cc79a7", "#0072b2", "#e69f00", "#d55e00", "#56b4e9", "#8a7500", "#5c6770")

# Colours of light pages; report.css defines them as variables.
INK, GREY, RULE = "#1c2733", "#66717d", "#d5dbe1"
# The colour of known structures.
TRUTH = "#aab2bb"
# All errors above this value, in angstrom, have the same colour.
PAE_TOP = 32
# The largest PAE image, in residues. The pixels of larger proteins are means over several residues.
LARGEST = 1024
# File formats of the figures of a prediction.
FORMATS = ("png", "svg")
# Opacities of the trace, from far to near.
SHADES = (0.4, 0.7, 1.0)

# The residues of each chain of a complex; empty for a single chain.
Spans = Mapping[str, slice]


@dataclass(frozen=True)
class ChartLine:
    """A value for each residue: [N], 0 to 100, NaN where unknown. color: None for the page's text colour."""

    label: str
    values: np.ndarray
    color: str | None = None
    dashed: bool = False


@dataclass(frozen=True)
class Box:
    """The plot area of a chart, in the units of its view box."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def height(self) -> float:
        return self.bottom - self.top

    def __str__(self) -> str:
        return f"{self.left:g} {self.top:g} {self.right:g} {self.bottom:g}"


WIDE, SQUARE = Box(40, 18, 472, 158), Box(46, 18, 366, 338)


def plddt_class(value: float) -> int:
    """Return the index in CLASSES of a pLDDT (0 to 100), after rounding to two digits as in B factors."""
    return next(index for index, (bound, _, _) in enumerate(CLASSES) if round(float(value), 2) > bound)


def chain_color(index: int) -> str:
    """Return the colour of a chain or model."""
    return CHAIN_COLORS[index % len(CHAIN_COLORS)]


def draw_plddt(lines: Sequence[ChartLine], chains: Spans) -> str:
    """Draw one or more lines of pLDDT along the residues, over bands in the colours of the four classes."""
    residues, box = len(lines[0].values), WIDE
    # View box units per tenth of pLDDT.
    scale = box.height / 1000
    upper, parts = 100.0, []
    for bound, color, _ in CLASSES:
        bottom = max(bound, 0.0)
        y, height = box.bottom - 10 * scale * upper, 10 * scale * (upper - bottom)
        parts.append(
            f'<rect x="{box.left}" y="{y:g}" width="{box.width}" height="{height:g}" fill="{color}" class="band"/>'
        )
        parts.append(_text(box.left - 6, y + 4, f"{upper:g}", "end"))
        upper = bottom
    parts += [_text(box.left - 6, box.bottom, "0", "end"), *_along(box, chains, residues)]
    ends = {span.stop for span in chains.values()}
    place = f"translate({box.left} {box.bottom}) scale({box.width / residues:.6g} {-scale:g})"
    for line in lines:
        style = (f' style="stroke:{line.color}"' if line.color else "") + (
            ' stroke-dasharray="5 3"' if line.dashed else ""
        )
        path = _path(line.values, ends)
        parts.append(f'<path class="line" transform="{place}" d="{path}"{style}/>')
    mean = float(np.mean(lines[0].values))
    label = f"pLDDT of {residues} residues, mean {mean:.1f}" if len(lines) == 1 or lines[1].dashed else "pLDDT by model"
    return _svg(box, 480, 194, "plddt", label, [*parts, _text((box.left + box.right) / 2, 190, "residue", "middle")])


def draw_pae(pae: np.ndarray, chains: Spans, name: str) -> str:
    """Draw the predicted aligned error, with dark pixels for low errors.

    pae: [N, N], angstrom; rows are the aligned residues, columns the scored residues.
    name: the id of the image, which `draw_small_pae` reuses.
    """
    box, residues = SQUARE, len(pae)
    codes = np.clip(np.rint(pooled(pae)), 0, PAE_TOP).astype(np.uint8)
    palette = _palette("Greens_r", PAE_TOP + 1)
    borders = ""
    for span in list(chains.values())[1:]:
        x, y = box.left + box.width * span.start / residues, box.top + box.height * span.start / residues
        borders += f"M{x:.1f} {box.top}V{box.bottom}M{box.left} {y:.1f}H{box.right}"
    parts = [
        f'<g id="{name}">{_image(box, palette_png(codes, palette))}<path class="border" d="{borders}"/></g>',
        *_along(box, chains, residues, borders=False),
        *(
            _text(box.left - 5, box.top + box.height * place / residues + 4, number, "end")
            for place, number in tick_labels(chains, residues, box.height)
        ),
        _text((box.left + box.right) / 2, 370, "scored residue", "middle"),
        _text(0, 0, "aligned residue", "middle", 'transform="translate(10 178) rotate(-90)"'),
        *_scale(box, 382, palette, "0", f"{PAE_TOP} Å", "expected position error"),
    ]
    mean = float(np.mean(pae))
    return _svg(box, 380, 408, "pae", f"predicted aligned error, mean {mean:.1f} angstrom", parts)


def draw_small_pae(name: str) -> str:
    """Draw the PAE image with this id again, small and without axes."""
    box = SQUARE
    view = f"{box.left} {box.top} {box.width} {box.height}"
    return f'<svg viewBox="{view}" class="small"><use href="#{name}"/></svg>'


def draw_coverage(depth: np.ndarray, rows: np.ndarray, total: int, chains: Spans) -> str:
    """Draw the coverage of an alignment as in ColabFold: rows by identity, and a line for the depth.

    depth: [N], rows: [R, N] and total: the fields of `Coverage`.
    """
    box, residues = WIDE, len(depth)
    # One colour for every 4 percent of identity.
    palette = [(255, 255, 255), *_palette("rainbow_r", 26)]
    codes = np.where(rows == 0, 0, 1 + (rows.astype(int) - 1 + 2) // 4).astype(np.uint8)
    heights = box.bottom - box.height * np.append(depth, depth[-1:]) / max(1, total)
    line = "".join(
        f"{'L' if i else 'M'}{box.left + box.width * i / residues:.1f} {y:.1f}" for i, y in _corners(heights)
    )
    parts = [
        _image(box, palette_png(codes, palette, clear=True)),
        f'<path class="line halo" d="{line}"/><path class="line" d="{line}"/>',
        f'<path class="frame" d="M{box.left} {box.top}V{box.bottom}H{box.right}"/>',
        *_along(box, chains, residues),
        *(_text(box.left - 6, box.bottom - box.height * n / total + 4, f"{n:,}", "end") for n in _ticks(total, 4)),
        _text((box.left + box.right) / 2, 190, "residue", "middle"),
        *_scale(Box(150, 0, 400, 0), 200, palette[1:], "0 %", "100 %", "identity with the query"),
    ]
    return _svg(box, 480, 228, "coverage", f"coverage of the alignment: {total} rows", parts)


def draw_trace(ca: np.ndarray, plddt: np.ndarray, truth: np.ndarray | None = None, ends: Collection[int] = ()) -> str:
    """Draw a projection of the Cα trace coloured by pLDDT, with the known structure in grey. It needs no WebGL.

    ca: [N, 3]; truth: [M, 3]; angstrom.
    ends: residues that are not bonded to the next residue.
    """
    center, rotation = ca.mean(0), facing(ca)
    # Rotated points, classes, stroke width, ends.
    traces: list[tuple[np.ndarray, np.ndarray, int, tuple[int, ...]]] = []
    if truth is not None:
        traces.append(((truth - center) @ rotation.T, np.full(len(truth), -1), 22, ()))
    traces.append(((ca - center) @ rotation.T, np.array([plddt_class(value) for value in plddt]), 40, tuple(ends)))
    flat = np.concatenate([points[:, :2] for points, *_ in traces])
    size = 3400 / max(1.0, float(np.ptp(flat, axis=0).max()))
    origin = (flat.max(0) + flat.min(0)) / 2
    parts = ""
    for points, classes, width, last in traces:
        parts += _bonds(points, np.rint((points[:, :2] - origin) * size).astype(int), classes, width, last)
    lines = f'<g fill="none" stroke-linecap="round">{parts}</g>'
    return f'<svg role="img" aria-label="Cα trace, coloured by pLDDT" viewBox="-1850 -1850 3700 3700">{lines}</svg>'


def facing(ca: np.ndarray) -> np.ndarray:
    """Compute the rotation [3, 3] that aligns the principal axes of ca [N, 3] with x, y and z, largest first."""
    return np.linalg.svd(ca - ca.mean(0), full_matrices=False)[2] if len(ca) > 2 else np.eye(3)


def bonded(ca: np.ndarray, ends: Collection[int]) -> np.ndarray:
    """Compute the mask [N - 1] of residues whose Cα is within 5 angstrom of the next Cα, except at chain ends."""
    near = np.linalg.norm(np.diff(ca, axis=0), axis=-1) < 5
    near[[end for end in ends if end < len(near)]] = False
    return near


def _bonds(points: np.ndarray, xy: np.ndarray, classes: np.ndarray, width: int, ends: Sequence[int]) -> str:
    """Draw the bonds of a trace, distant ones first and paler. Broken bonds are left out.

    points: [N, 3], angstrom; xy: int [N, 2], positions in the view box; classes: [N], -1 for a known structure.
    """
    joined = bonded(points, ends)
    if not joined.any():
        return ""
    depth = (points[1:, 2] + points[:-1, 2]) / 2
    near = (depth - depth.min()) / max(1e-6, float(np.ptp(depth)))
    shade = np.minimum(near * len(SHADES), len(SHADES) - 1).astype(int)
    parts = ""
    for level, opacity in enumerate(SHADES):
        for kind in np.unique(classes).tolist():
            bond_indices = np.flatnonzero(joined & (shade == level) & (classes[:-1] == kind)).tolist()
            steps = xy[1:] - xy[:-1]
            d = "".join(f"M{xy[i, 0]} {xy[i, 1]}l{steps[i, 0]} {steps[i, 1]}" for i in bond_indices)
            color = CLASSES[kind][1] if kind >= 0 else TRUTH
            parts += f'<path d="{d}" stroke="{color}" stroke-width="{width}" opacity="{opacity}"/>' if d else ""
    return parts


def pooled(pae: np.ndarray) -> np.ndarray:
    """Average pae [N, N] over square blocks, so that at most LARGEST rows and columns are left."""
    step = -(-len(pae) // LARGEST)
    if step == 1:
        return pae
    starts = np.arange(0, len(pae), step)
    sums = np.add.reduceat(np.add.reduceat(pae.astype(np.float64), starts, 0), starts, 1)
    counts = np.diff(np.append(starts, len(pae)))
    return sums / np.outer(counts, counts)


def palette_png(codes: np.ndarray, palette: Sequence[tuple[int, ...]], clear: bool = False) -> bytes:
    """Encode palette indices, uint8 [H, W], as a PNG.

    palette: RGB colours, 0 to 255.
    clear: make the first colour transparent.
    Rows are encoded as differences from the row above (PNG filter 2). The page's script relies on that filter when it
    reads values back from the image.
    """
    height, width = codes.shape
    above = np.vstack([np.zeros((1, width), np.uint8), codes[:-1]])
    lines = np.hstack([np.full((height, 1), 2, np.uint8), codes - above])
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", bytes(part for color in palette for part in color)),
        *([(b"tRNS", b"\0")] if clear else []),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    ]
    png = b"\x89PNG\r\n\x1a\n"
    for kind, data in chunks:
        png += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return png


def _palette(name: str, levels: int) -> list[tuple[int, ...]]:
    """Return `levels` colours of a matplotlib colour map, 0 to 255."""
    # Importing matplotlib takes a quarter of a second, so only callers that draw pay for it.
    from matplotlib import colormaps

    return [tuple(round(255 * part) for part in colormaps[name](i / (levels - 1))[:3]) for i in range(levels)]


def _image(box: Box, png: bytes) -> str:
    source = base64.b64encode(png).decode()
    place = f'x="{box.left}" y="{box.top}" width="{box.width}" height="{box.height}"'
    return f'<image {place} preserveAspectRatio="none" href="data:image/png;base64,{source}"/>'


def _path(values: np.ndarray, ends: Collection[int]) -> str:
    """Draw a path through values [N] at x = 0.5, 1.5 ..., in tenths. It is interrupted at chain ends and at NaN."""
    parts, before = [], None
    for i, value in enumerate(values):
        if np.isnan(value):
            before = None
            continue
        tenth = round(10 * float(value))
        parts.append(f"M{i + 0.5} {tenth}" if before is None or i in ends else f"l1 {tenth - before}")
        before = tenth
    return "".join(parts)


def _corners(heights: np.ndarray) -> Iterator[tuple[int, float]]:
    """Yield (x, y) of the corners of a step function, without corners inside constant runs."""
    for i, y in enumerate(heights.tolist()):
        if i and i < len(heights) - 1 and y == heights[i - 1]:
            continue
        if i:
            yield i, float(heights[i - 1])
        yield i, y


def _ticks(top: int, count: int) -> list[int]:
    """Choose at most `count` + 1 round numbers from 1 to `top`."""
    steps = (base * 10**power for power in range(9) for base in (1, 2, 5))
    step = next(step for step in steps if top / step <= count)
    return list(range(step, top + 1, step))


def tick_labels(chains: Spans, residues: int, width: float) -> list[tuple[float, str]]:
    """Choose the labels of an axis: (position, number within the chain). Chain starts are labelled A1, B1 ...

    width: the length of the axis. Labels are at least 30 of its units apart. Chain starts replace earlier numbers.
    """
    labels: list[tuple[float, str]] = []
    longest = max((span.stop - span.start for span in chains.values()), default=residues)
    step = (_ticks(longest, max(2, int(width * longest / residues / 62))) or [1])[0]
    start = 0.0
    for name, span in (chains or {"": slice(0, residues)}).items():
        for number in [1, *range(step, span.stop - span.start + 1, step)]:
            position = span.start + number - 0.5
            is_near = bool(labels) and (position - labels[-1][0]) * width / residues <= 30
            if number == 1 and is_near and labels[-1][0] > start:
                labels.pop()
                is_near = False
            if not is_near:
                labels.append((position, f"{name}{number}" if number == 1 else str(number)))
                start = position if number == 1 else start
    return labels


def _along(box: Box, chains: Spans, residues: int, borders: bool = True) -> Iterator[str]:
    """Yield the residue numbers below a chart, the chain names above it, and the borders between chains."""
    for place, number in tick_labels(chains, residues, box.width):
        yield _text(box.left + box.width * place / residues, box.bottom + 15, number, "middle")
    for name, span in chains.items():
        x, width = box.left + box.width * span.start / residues, box.width * (span.stop - span.start) / residues
        if borders and span.start:
            yield f'<path class="border" d="M{x:.1f} {box.top}V{box.bottom}"/>'
        if width >= 7 * (len(name) + 1):
            yield _text(x + width / 2, box.top - 5, name, "middle")


def _scale(box: Box, y: float, palette: Sequence[tuple[int, ...]], low: str, high: str, label: str) -> Iterator[str]:
    """Yield a colour bar with the labels of its ends and its title."""
    width = box.width / len(palette)
    for i, color in enumerate(palette):
        x = box.left + i * width
        yield f'<rect x="{x:.2f}" y="{y}" width="{width + 0.4:.2f}" height="8" fill="#{bytes(color).hex()}"/>'
    yield _text(box.left, y + 21, low, "start")
    yield _text((box.left + box.right) / 2, y + 21, label, "middle")
    yield _text(box.right, y + 21, high, "end")


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.4g}" y="{y:.4g}" text-anchor="{anchor}" {more}>{html.escape(text)}</text>'


def _svg(box: Box, width: int, height: int, kind: str, label: str, parts: Sequence[str]) -> str:
    head = f'role="img" aria-label="{html.escape(label)}" viewBox="0 0 {width} {height}"'
    return f'<svg {head} class="chart" data-kind="{kind}" data-box="{box}">{"".join(parts)}</svg>'
