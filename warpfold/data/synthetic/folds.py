"""Define the folds of sample proteins by the torsions of loops and sheets, and draw blueprints from them."""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Element; phi and psi in degrees; required letters, most frequent first.
Residue = tuple[str, tuple[float, float], str]

HELIX: Residue = ("H", (-62, -43), "")
# The first and the last residue of the chain.
FIRST: Residue = ("T", (-80, 140), "SKTG")
LAST: Residue = ("T", (-80, -40), "KSTG")
# Standard deviation of the torsions in degrees, by element.
JITTER = {"H": 1.5, "E": 1.5, "L": 2.5, "T": 6.0}


@dataclass(frozen=True)
class Motif:
    """A loop, or a sheet of antiparallel strands with tight turns."""

    name: str
    residues: tuple[Residue, ...]


def _parse_motifs(table: str) -> dict[str, list[Motif]]:
    """Parse a table of motifs. Returns them by their elements, which a loop connects or of which a sheet consists.

    A row has the elements, the name, and a word for each residue: "phi,psi:LETTERS" in loops and turns (L), "phi,psi"
    in strands (E).
    """
    motifs: dict[str, list[Motif]] = {}
    for row in re.split(r"\n(?=[EH])", table.strip()):
        key, name, *words = row.split()
        residues: list[Residue] = []
        for word in words:
            torsions, _, letters = word.partition(":")
            phi, psi = map(int, torsions.split(","))
            residues.append(("L" if letters else "E", (phi, psi), letters))
        motifs.setdefault(key, []).append(Motif(name, tuple(residues)))
    return motifs


# Loops by the elements that they connect. Their names are the ABEGO letters of the torsions, regions of the
# Ramachandran plot that loops of designed proteins use (Koga et al., Nature 491, 222 (2012); Lin et al., PNAS 112,
# E5478 (2015)). The angles within a region are from a search for loops with which straight elements pack.
LOOPS = _parse_motifs("""
HH GB    81,-3:G -68,128:ST
HH GBA   67,41:N -124,133:IV -62,-41:PD
HH BAB   -106,123:TN -96,12:N -74,140:PS
HH GABB  81,25:G -71,-50:DN -94,172:H -54,139:P
EH AB    -91,-16:D -112,129:S
EH GBB   51,46:N -123,138:T -63,153:P
EH GBAB  71,1:G -122,109:KR -104,-18:D -67,134:P
HE GBAB  86,9:G -92,134:V -54,-34:E -60,136:P
HE BAAB  -129,123:N -76,-35:P -58,-25:D -66,142:H
HE GBA   59,43:G -100,159:T -59,-32:P
""")

# Sheets of two and three strands, with torsions fitted to close the hydrogen bonds. Their names are the types of the
# turns, which have two residues each: I' (usually Asn-Gly) and II' (usually Gly-Asn): Sibanda & Thornton, Nature 316,
# 170 (1985).
SHEETS = _parse_motifs("""
EE I'
-115,142 -111,127 -126,132 -106,129 -125,136 -106,125 -139,135 61,32:N
71,20:G -121,140 -93,124 -122,139 -108,126 -124,131 -106,123 -128,127
EE II'
-115,139 -107,131 -119,129 -110,130 -119,132 -112,123 -122,109 60,-122:G
-98,10:ST -114,144 -120,132 -122,138 -117,130 -122,138 -115,129 -120,144
EEE I'-I'
-115,135 -114,116 -134,125 -109,127 -135,135 -102,130 -144,135 63,29:N
75,15:G -117,145 -94,120 -112,131 -116,128 -116,123 -150,139 63,29:N
74,15:G -113,134 -103,128 -122,128 -103,125 -132,154 -109,135 -115,135
EEE I'-II'
-115,135 -115,123 -126,125 -110,125 -134,131 -103,126 -143,136 61,33:N
70,22:G -123,140 -95,114 -109,125 -113,121 -113,123 -128,112 59,-125:G
-93,7:ST -109,135 -121,131 -125,136 -118,130 -129,147 -108,135 -115,135
""")
# Largest number of residues that are removed at both ends of a sheet.
MAX_TRIM = 2


@dataclass(frozen=True)
class Fold:
    """A sequence of elements: "H" for a helix of `helix` (minimum, maximum) residues, keys of SHEETS, keys of LOOPS.

    weight: relative frequency. closed: whether the first and the last element must be in contact.
    """

    name: str
    parts: tuple[str, ...]
    helix: tuple[int, int]
    weight: float
    closed: bool = False


FOLDS: tuple[Fold, ...] = (
    Fold("helical hairpin", ("H", "HH", "H"), (12, 18), 0.25),
    Fold("three-helix bundle", ("H", "HH", "H", "HH", "H"), (11, 17), 0.35, closed=True),
    Fold("hairpin and helix", ("EE", "EH", "H"), (11, 16), 0.1),
    Fold("helix and hairpin", ("H", "HE", "EE"), (11, 16), 0.1),
    Fold("helix, hairpin, helix", ("H", "HE", "EE", "EH", "H"), (11, 15), 0.1),
    Fold("three strands and helix", ("EEE", "EH", "H"), (11, 16), 0.1),
)


@dataclass(frozen=True)
class Blueprint:
    """A fold with all random choices for building a chain.

    elements: a letter per residue: H helix, E strand, L loop or turn, T tail. letters: residue types that a position
    requires, most frequent first, "" for any. bodies: [N], helices and sheets numbered along the chain, -1 for others.
    torsions: [N, 2], phi and psi in degrees. loops: names of the loops and sheets.
    """

    fold: Fold
    elements: str
    letters: tuple[str, ...]
    bodies: NDArray[np.int64]
    torsions: NDArray[np.float64]
    loops: tuple[str, ...]


def draw_blueprint(fold: Fold, rng: np.random.Generator) -> Blueprint:
    """Draw lengths, loop types and the jitter of the torsions of a fold."""
    residues, bodies, names = [FIRST], [-1], []
    for body, part in enumerate(fold.parts):
        if part == "H":
            new = [HELIX] * int(rng.integers(*fold.helix, endpoint=True))
        else:
            choices = LOOPS.get(part) or SHEETS[part]
            motif = choices[rng.integers(len(choices))]
            cut = int(rng.integers(MAX_TRIM, endpoint=True)) if part in SHEETS else 0
            new = list(motif.residues[cut : len(motif.residues) - cut])
            names.append(motif.name)
        residues += new
        bodies += [-1 if part in LOOPS else body] * len(new)
    elements, torsions, letters = zip(*residues, LAST)
    jitter = np.array([JITTER[kind] for kind in elements])[:, None] * rng.normal(size=(len(elements), 2))
    angles = np.array(torsions, dtype=np.float64) + jitter
    return Blueprint(fold, "".join(elements), letters, np.array([*bodies, -1]), angles, tuple(names))
