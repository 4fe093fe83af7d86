"""Tables of the generator of sample proteins: folds, loops, sheets, and how far torsions stray."""

from dataclasses import dataclass

Torsions = tuple[tuple[int, int], ...]

HELIX = (-62, -43)  # phi, psi, degrees
FIRST, LAST = (-80, 140), (-80, -40)  # the first and the last residue
JITTER = {"H": 1.5, "E": 1.5, "L": 2.5, "T": 6.0}  # standard deviation of each torsion, degrees, by element
TAIL_LETTERS = ("SKTG", "KSTG")  # first and last residue


@dataclass(frozen=True)
class Loop:
    """A loop type.  torsions: (phi, psi) of each residue, degrees.  letters: what it is made of, commonest first."""

    name: str
    torsions: Torsions
    letters: tuple[str, ...]


# Names are ABEGO letters of the torsions, the regions of the Ramachandran plot that loops of designed proteins use
# (Koga et al., Nature 491, 222 (2012); Lin et al., PNAS 112, E5478 (2015)).  The degrees within a region come from our
# own search for loops that let straight elements pack.
LOOPS: dict[str, tuple[Loop, ...]] = {
    "HH": (
        Loop("GB", ((81, -3), (-68, 128)), ("G", "ST")),
        Loop("GBA", ((67, 41), (-124, 133), (-62, -41)), ("N", "IV", "PD")),
        Loop("BAB", ((-106, 123), (-96, 12), (-74, 140)), ("TN", "N", "PS")),
        Loop("GABB", ((81, 25), (-71, -50), (-94, 172), (-54, 139)), ("G", "DN", "H", "P")),
    ),
    "EH": (
        Loop("AB", ((-91, -16), (-112, 129)), ("D", "S")),
        Loop("GBB", ((51, 46), (-123, 138), (-63, 153)), ("N", "T", "P")),
        Loop("GBAB", ((71, 1), (-122, 109), (-104, -18), (-67, 134)), ("G", "KR", "D", "P")),
    ),
    "HE": (
        Loop("GBAB", ((86, 9), (-92, 134), (-54, -34), (-60, 136)), ("G", "V", "E", "P")),
        Loop("BAAB", ((-129, 123), (-76, -35), (-58, -25), (-66, 142)), ("N", "P", "D", "H")),
        Loop("GBA", ((59, 43), (-100, 159), (-59, -32)), ("G", "T", "P")),
    ),
}


@dataclass(frozen=True)
class Sheet:
    """Antiparallel strands joined by tight turns, in chain order, torsions fitted so that the hydrogen bonds close.

    Up to `trim` residues may be left away at both ends.
    """

    name: str
    elements: str
    torsions: Torsions
    letters: tuple[str, ...]
    trim: int


def _torsions(text: str) -> Torsions:
    return tuple((int(phi), int(psi)) for phi, psi in (word.split(",") for word in text.split()))


# Turns of two residues: types I' (usually Asn-Gly) and II' (usually Gly-Asn): Sibanda & Thornton, Nature 316, 170
# (1985).
_TURN_1, _TURN_2 = ("N", "G"), ("G", "ST")
_ANY = ("",)
SHEETS: dict[str, tuple[Sheet, ...]] = {
    "EE": (
        Sheet(
            "I'",
            "EEEEEEELLEEEEEEE",
            _torsions(
                """-115,142 -111,127 -126,132 -106,129 -125,136 -106,125 -139,135 61,32
                71,20 -121,140 -93,124 -122,139 -108,126 -124,131 -106,123 -128,127"""
            ),
            _ANY * 7 + _TURN_1 + _ANY * 7,
            2,
        ),
        Sheet(
            "II'",
            "EEEEEEELLEEEEEEE",
            _torsions(
                """-115,139 -107,131 -119,129 -110,130 -119,132 -112,123 -122,109 60,-122
                -98,10 -114,144 -120,132 -122,138 -117,130 -122,138 -115,129 -120,144"""
            ),
            _ANY * 7 + _TURN_2 + _ANY * 7,
            2,
        ),
    ),
    "EEE": (
        Sheet(
            "I'-I'",
            "EEEEEEELLEEEEEELLEEEEEEE",
            _torsions(
                """-115,135 -114,116 -134,125 -109,127 -135,135 -102,130 -144,135 63,29
                75,15 -117,145 -94,120 -112,131 -116,128 -116,123 -150,139 63,29
                74,15 -113,134 -103,128 -122,128 -103,125 -132,154 -109,135 -115,135"""
            ),
            _ANY * 7 + _TURN_1 + _ANY * 6 + _TURN_1 + _ANY * 7,
            2,
        ),
        Sheet(
            "I'-II'",
            "EEEEEEELLEEEEEELLEEEEEEE",
            _torsions(
                """-115,135 -115,123 -126,125 -110,125 -134,131 -103,126 -143,136 61,33
                70,22 -123,140 -95,114 -109,125 -113,121 -113,123 -128,112 59,-125
                -93,7 -109,135 -121,131 -125,136 -118,130 -129,147 -108,135 -115,135"""
            ),
            _ANY * 7 + _TURN_1 + _ANY * 6 + _TURN_2 + _ANY * 7,
            2,
        ),
    ),
}


@dataclass(frozen=True)
class Fold:
    """An order of parts: "H" a helix of `helix` (shortest, longest) residues, keys of SHEETS, keys of LOOPS.

    weight: how often it is made.  closed: the first and the last part must touch.
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
