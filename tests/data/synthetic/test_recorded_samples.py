"""Compare generated samples, and each step of the generator, with recorded results.

Sequences and alignments follow from the seed by many thresholds and random numbers, so a change anywhere in the
generator changes them. After an intended change, record the tables again with `python -m
tests.data.synthetic.test_recorded_samples`.
"""

from collections.abc import Sequence
from functools import cache
from pprint import pprint

import numpy as np
import pytest
from numpy.typing import ArrayLike

from warpfold.data.synthetic import backbone as backbones
from warpfold.data.synthetic import dimers, proteins, sequence, sidechain
from warpfold.data.synthetic.backbone import clashes, frames, is_compact, with_o_and_cb
from warpfold.data.synthetic.dimers import dock, make_dimer, tie_sites
from warpfold.data.synthetic.folds import FOLDS, Blueprint, Fold, draw_blueprint
from warpfold.data.synthetic.proteins import Protein, make_protein, to_chain
from warpfold.data.synthetic.sequence import Sites, model_sites
from warpfold.data.synthetic.sidechain import ROTAMERS, add_side_chains, rotamers

PROTEINS = [
    (
        "sample00000 SRLERIITEALNLGTPRCEITVGSRWFKVQNTPVEEAERFLRALK GBA II' GBB",
        [8.478429468, 263.238702276, -1.692209717, -149.78495796, -12.203130328, -954.266443552],
        [1.624119183, 2.654762717, -29.657634981, 1.216907429],
        1.939038845,
    ),
    (
        "sample00001 SEAIELAEELARKLGTPKVTVLVNGTVFKIEK GBA I'",
        [1.438361606, -172.201469792, 5.545274802, -212.303382499, -0.503797523, 1169.449951913],
        [-2.384648125, 0.22547817, -4.152465536, 0.665544711],
        2.864402068,
    ),
    (
        "sample00002 SAALKLFKKIMLAAKKANIPEAAKAAEKLAKKK GBA",
        [5.631969491, 165.625620733, -1.951877714, -29.452117431, -4.29597795, 439.391685122],
        [-1.941919527, 3.208081349, 33.114503188, 0.245745214],
        0.426568718,
    ),
    (
        "sample00003 SLDALARKFANKKGVEPAIATVNGSTFTVG GBAB I'",
        [-19.542379631, 67.903279393, 3.12505854, 246.241040807, 1.439167743, 589.99777956],
        [-1.728337526, -1.95401477, 2.206768309, 0.626553141],
        1.426324293,
    ),
    (
        "sample00004 SELMEKLSQIALRGDEPESEAEELAERAAKKANVDDAASQSEKQRDKVAK GABB GBA",
        [7.444769493, 83.862382284, 1.320954351, 372.752906576, -3.272654413, -311.421591149],
        [-2.638721168, 0.599805489, 15.721509915, 0.461226325],
        -4.240086115,
    ),
    (
        "sample00005 SKVTLQVGSYQVRVQNTPDEAAKKIIRKRLK II' GBB",
        [-1.835000457, 39.236527998, -4.413506576, 57.374454792, 0.910417718, 156.709944013],
        [-0.490696128, -0.229857061, 17.938388702, -0.443017801],
        -0.858699484,
    ),
    (
        "sample00006 RESMAREAQRFAQRAGTPRVRVKVGSTIYQVTK GBA II'",
        [30.656177652, 236.396125142, 8.189726845, 5.613308214, 2.368433422, -925.91525302],
        [-2.931228338, 1.257094448, 14.272501833, 0.187643584],
        0.674133682,
    ),
    (
        "sample00007 SALARALAQLQQLVNRAGSREAARKARELVKEARKANIPEAAQALAREMIRK GB GBA",
        [10.085871759, -65.91725993, 1.875132388, -17.25792942, -6.718711888, 1143.011340165],
        [1.029409683, 3.719831573, 33.669659173, 0.343492256],
        -1.912768828,
    ),
]
DIMERS = [
    (
        "dimer00000 SLADRLAQLIEQALRAGSRPARAEAAKVEKKLK:SLADRLAQLIEQALRAGSRPARAEAAKVEKKLK",
        [
            [54.717618922, 179.836733763, -1.272618916, -18.992849719, 1.608745509, -392.679587775],
            [-2.686219293, 179.836733763, -1.272618916, -18.992849719, 1.608745509, -392.679587775],
        ],
    ),
    (
        "dimer00001 SDEFKEVVKILKEAEKAGTKAAKEAASLLEDRK:SKEIAKAIRRAKEAADRGNHPDEAAKQLVEKAIK",
        [
            [60.488017135, 23.904868693, 0.29094042, 9.765859016, -1.329864096, -1497.100213189],
            [20.451394959, 7.212649748, -4.213617802, -229.148115975, -3.004277307, 125.488439302],
        ],
    ),
    (
        "dimer00002 SVELIDDAARKAVKANVPEAVLHAVKKKENAG:SVELIDDAARKAVKANVPEAVLHAVKKKENAG",
        [
            [-13.941502043, -11.842628895, 1.994987841, 41.25400303, 0.458429709, -1517.46448612],
            [46.979330085, -11.842628895, 1.994987841, 41.25400303, 0.458429709, -1517.46448612],
        ],
    ),
    (
        "dimer00003 SDIEESLKEAEWAGSEPAVREADAIARQKSK:SEEKSRAIDKARKANHPDAEAKAQEIRDKKK",
        [
            [-0.930695152, -60.566823938, -0.887968907, 57.512023964, -6.111298476, 1148.665614219],
            [4.43252542, 23.087891377, 0.994364266, 80.529387508, -0.051809515, 1150.057138172],
        ],
    ),
]
CROWDS: list[tuple[str, float] | None] = [
    ("WRMQNSAFKLETCGYHIDVAWRLQNSAFKLETCGYHIDVALRMQN", 11.385939788),
    ("WRMQNSAFKLSTCGLHIDVPWRMQNSAFKLET", -23.812607745),
    ("WRMQNSAFKLETCGYHISVPWRMQNSAFKLETC", 0.476886648),
    ("WRMQNSAFKVETCGYHISVAWRMQNSAFKL", 1.092249377),
    ("WRMQNSALKLETCGYHIDVGVRMQSSAFSLETCGYHVDVAVRMSNSAFKL", -0.951126149),
    ("WRMQNSAFKLETCGYHIDVPWQMQNSAFKLE", 3.293833855),
    ("WRMQNSAAKLESCGYSIDVPWRMQNSAFKLETC", -19.178949993),
    ("WRMQNSAFKLETCGYHIDAPWRMQNSAFKLETAGYSADVPLRMQNSAFKLET", -17.956279706),
    ("WWWFWWVLWWAWWLLFWWLWLLFFFWWWWWWW", 20.807946406),
    ("WRWRLRWRWRWRWSWRLRWRWQLRWSWRWRW", -2.779693511),
]
ROTAMER_ATOMS = {
    "A": -0.707448375,
    "G": 0.545504341,
    "R": 5.932015127,
    "N": 4.420757724,
    "D": 2.045252045,
    "C": 1.414245338,
    "Q": -3.542415752,
    "E": -2.802247679,
    "H": 2.143243898,
    "I": 8.959050531,
    "L": -1.878540598,
    "K": -4.87972986,
    "M": 5.480287319,
    "F": -0.208888721,
    "P": 1.425244037,
    "S": -2.739338818,
    "T": -3.31955797,
    "W": -4.899275549,
    "Y": -5.228575704,
    "V": -2.36091336,
}
FOLD_COUNTS = {
    "helical hairpin": (58, 147, 5.311827178),
    "three-helix bundle": (12, 71, 17.468541493),
    "hairpin and helix": (11, 82, 5.533346651),
    "helix and hairpin": (17, 33, -0.708472242),
    "helix, hairpin, helix": (4, 29, -5.447514139),
    "three strands and helix": (9, 26, -1.959176643),
}


# ---- comparisons


def fingerprint(values: ArrayLike) -> float:
    """Reduce an array to a number that changes with each value and with their order."""
    flat = np.asarray(values, np.float64).ravel()
    return float(flat @ np.cos(np.arange(flat.size)))


def same(value: object) -> object:
    """Allow for the rounding of another machine."""
    return pytest.approx(value, rel=1e-8, abs=1e-8)


@cache
def protein(index: int) -> Protein:
    return make_protein(5, index)


@cache
def dimer(index: int) -> tuple[Protein, Protein]:
    return make_dimer(7, index, 30, 38, (16, 24))


def backbone_of(sample: Protein) -> np.ndarray:
    return with_o_and_cb(sample.atoms[:, :3], sample.blueprint.torsions[:, 1])


def numbers_of(sample: Protein) -> list[float]:
    alignment, blueprint = sample.alignment, sample.blueprint
    arrays = (sample.atoms, alignment.rows, alignment.deletions, blueprint.torsions, blueprint.bodies)
    return [*map(fingerprint, arrays), fingerprint([sum(map(ord, name)) for name in alignment.names])]


def sites_of(sites: Sites) -> list[float]:
    return [fingerprint(part) for part in (sites.preferences, sites.fixed, sites.pairs, sites.couplings)]


def crowded(index: int, types: str = "") -> tuple[str, np.ndarray] | None:
    """Place a sequence of large residues on a backbone that was made for another one.

    types: repeated along the chain; by default all types, and every eleventh residue is fixed.
    """
    backbone = backbone_of(protein(index))
    number = np.arange(len(backbone))
    letters = "".join((types or "WRMQNSAFKLETCGYHIDVP")[i % (len(types) or 20)] for i in number)
    return add_side_chains(letters, backbone, (number % 11 == 5) & (types == ""))


def compact_ones(fold: Fold) -> tuple[int, int, float]:
    """Count the compact folds, and those without clashes, of 200 blueprints."""
    rng = np.random.default_rng(0)
    blueprints = [draw_blueprint(fold, rng) for _ in range(200)]
    chains = [backbones.build(blueprint.torsions[None])[0] for blueprint in blueprints]
    compact = [is_compact(*pair) for pair in zip(blueprints, chains)]
    clear = [not clashes(with_o_and_cb(chain, b.torsions[:, 1])) for chain, b in zip(chains, blueprints)]
    return sum(compact), sum(clear), fingerprint([2 * a + b for a, b in zip(compact, clear)])


def recorded_proteins() -> list[tuple[str, list[float], list[float], float]]:
    table = []
    for sample in map(protein, range(8)):
        backbone = backbone_of(sample)
        burial = sequence._count_burial(backbone[:, 1], backbone[:, 4])
        sites = sites_of(model_sites(sample.blueprint, backbone))
        loops = " ".join(sample.blueprint.loops)
        table.append((f"{sample.name} {sample.sequence} {loops}", numbers_of(sample), sites, fingerprint(burial)))
    return table


def recorded_dimers() -> list[tuple[str, list[list[float]]]]:
    return [(f"{a.name} {a.sequence}:{b.sequence}", [numbers_of(a), numbers_of(b)]) for a, b in map(dimer, range(4))]


def recorded_crowds() -> list[tuple[str, float] | None]:
    return [
        None if placed is None else (placed[0], fingerprint(placed[1]))
        # The last two need all rounds of replacements.
        for placed in (*map(crowded, range(8)), crowded(1, "W"), crowded(5, "WR"))
    ]


def recorded_rotamers() -> dict[str, float]:
    # Other tests may have filled the cache.
    return {letter: fingerprint(rotamers.__wrapped__(letter)) for letter in ROTAMERS}


def recorded_folds() -> dict[str, tuple[int, int, float]]:
    return {fold.name: compact_ones(fold) for fold in FOLDS}


def test_proteins_are_those_recorded() -> None:
    for actual, wanted in zip(recorded_proteins(), PROTEINS, strict=True):
        assert actual[0] == wanted[0]
        assert actual[1] == same(wanted[1]), "atoms, rows, deletions, torsions, bodies, names"
        assert actual[2] == same(wanted[2]), "preferences, fixed, pairs, couplings"
        assert actual[3] == same(wanted[3]), "burial"


def test_dimers_are_those_recorded() -> None:
    for actual, wanted in zip(recorded_dimers(), DIMERS, strict=True):
        assert actual[0] == wanted[0]
        assert [actual[1][0], actual[1][1]] == [same(numbers) for numbers in wanted[1]]


def test_large_residues_are_replaced_as_recorded() -> None:
    for actual, wanted in zip(recorded_crowds(), CROWDS, strict=True):
        assert (actual is None) == (wanted is None)
        if actual is not None and wanted is not None:
            assert actual[0] == wanted[0]
            assert actual[1] == same(wanted[1])


def test_rotamers_are_those_recorded() -> None:
    assert recorded_rotamers() == same(ROTAMER_ATOMS)


def test_the_folds_that_pack_are_those_recorded() -> None:
    for name, actual in recorded_folds().items():
        assert actual == same(FOLD_COUNTS[name])


def test_defaults() -> None:
    """The defaults are 30 to 60 residues, 16 to 128 rows, and all folds."""
    explicit = make_protein(5, 2, 30, 60, (16, 128), FOLDS)
    assert numbers_of(explicit) == numbers_of(protein(2))
    pair, explicit_pair = make_dimer(3, 1), make_dimer(3, 1, 30, 60, (16, 128))
    assert [numbers_of(chain) for chain in pair] == [numbers_of(chain) for chain in explicit_pair]
    assert {len(make_protein(1, i, 30, 40, (2, 3)).alignment) for i in range(6)} == {2, 3}


# ---- geometry


def test_atoms_in_the_frame_of_a_residue() -> None:
    """N, CA, C, O and CB have the recorded bonds exactly, and CB the coordinates of Supp. Alg. 21's frame."""
    psi = np.array([-40.0, 130.0, 0.0])
    torsions = np.stack([np.array([-60.0, -120.0, 55.0]), psi], -1)[None]
    atoms = with_o_and_cb(backbones.build(torsions)[0], psi)
    n, ca, c, o, cb = np.moveaxis(atoms, 1, 0)
    for a, b, length in ((n, ca, 1.459), (ca, c, 1.525), (c, o, 1.231), (c[:-1], n[1:], 1.329)):
        np.testing.assert_allclose(np.linalg.norm(a - b, axis=-1), length, atol=1e-9)
    for points, degrees in (((n, ca, c), 111.0), ((ca, c, o), 120.1), ((c[:-1], n[1:], ca[1:]), 121.7)):
        u, v = points[0] - points[1], points[2] - points[1]
        cosine = (u * v).sum(-1) / np.linalg.norm(u, axis=-1) / np.linalg.norm(v, axis=-1)
        np.testing.assert_allclose(np.degrees(np.arccos(cosine)), degrees, atol=1e-9)
    x = (c - ca) / 1.525
    z = np.cross(x, n - ca) / np.linalg.norm(np.cross(x, n - ca), axis=-1, keepdims=True)
    rotation, origin = frames(atoms)
    np.testing.assert_allclose(rotation, np.stack([x, np.cross(z, x), z], -1), atol=1e-9)
    np.testing.assert_array_equal(origin, ca)
    local = np.einsum("nij,ni->nj", rotation, cb - ca)
    np.testing.assert_allclose(local, np.tile([-0.525, -0.777, -1.209], (3, 1)), atol=1e-9)
    # O is opposite to the next N in their plane.
    cross = np.cross(o[:-1] - c[:-1], n[1:] - c[:-1])
    np.testing.assert_allclose((cross * (ca[:-1] - c[:-1])).sum(-1), 0.0, atol=1e-9)
    assert (((o - ca)[:-1] * (n[1:] - ca[:-1])).sum(-1) < np.linalg.norm(o - ca, axis=-1)[:-1] * 2.4).all()
    np.testing.assert_allclose(atoms[0, 0], 0.0, atol=1e-12)


@pytest.mark.parametrize(
    ("separation", "atoms", "limit"),
    [
        (1, (1, 1), 0.0),
        (2, (1, 1), 2.75),
        (2, (0, 3), 2.6),
        (3, (1, 1), 3.0),
        (3, (0, 3), 2.6),
        (3, (3, 0), 2.6),
        (4, (0, 0), 2.6),
        (4, (3, 3), 2.6),
        (3, (0, 1), 3.0),
        (3, (2, 3), 3.0),
        (3, (4, 4), 3.0),
        (3, (2, 2), 3.0),
        (3, (4, 0), 3.0),
    ],
)
def test_clashes_start_below_the_limit(separation: int, atoms: tuple[int, int], limit: float) -> None:
    """atoms: of N, CA, C, O, CB. The limit depends on their elements, and on the separation of their residues."""
    for distance, clash in ((limit - 1e-3, limit > 0), (limit, False), (limit + 1e-3, False)):
        backbone = np.zeros((6, 5, 3))
        # All atoms are far apart.
        backbone[..., 0] = 100.0 * np.arange(30).reshape(6, 5)
        backbone[separation, atoms[1]] = backbone[0, atoms[0]] + [0.0, distance, 0.0]
        assert clashes(backbone) == clash


def is_compact_by_pairs(blueprint: Blueprint, atoms: np.ndarray) -> bool:
    """Apply the rules of `is_compact` to each pair of residues, and count with sets."""
    ca, bodies, n = atoms[:, 1], blueprint.bodies, len(atoms)
    x = (atoms[:, 2] - ca) / np.linalg.norm(atoms[:, 2] - ca, axis=-1, keepdims=True)
    z = np.cross(x, atoms[:, 0] - ca)
    z = z / np.linalg.norm(z, axis=-1, keepdims=True)
    cb = ca - 0.525 * x - 0.777 * np.cross(z, x) - 1.209 * z
    first, second = np.triu_indices(n, 3)
    of_ca, of_cb = (np.linalg.norm(each[first] - each[second], axis=-1) for each in (ca, cb))
    if of_ca.min() < 4.0 or of_cb.min() < 3.6:
        return False
    a, b = bodies[first], bodies[second]
    across = (second - first > 7) & (np.minimum(a, b) != -1) & (a != b)
    if (of_ca[across] < 5.0).any() or (of_cb[across] < 4.0).any():
        return False
    if np.sqrt(ca.var(0).sum()) >= 1.15 * 2.2 * n**0.38:
        return False
    near = across & (of_cb < 8.0)
    contacts = set(zip(first[near].tolist(), second[near].tolist()))
    touched = {i for pair in contacts for i in pair}
    names = sorted({*bodies.tolist()} - {-1})
    for body in names:
        members = np.flatnonzero(bodies == body).tolist()
        limit = 0.35 if blueprint.elements[members[0]] == "H" else 0.22
        if len(touched & {*members}) / len(members) <= limit:
            return False
    ends = [(i, j) for i, j in contacts if (bodies[i], bodies[j]) == (names[0], names[-1])]
    return not blueprint.fold.closed or len(ends) >= 3


SIZES = np.arange(0.8, 1.25, 0.01)


@pytest.mark.parametrize("fold", FOLDS, ids=[fold.name for fold in FOLDS])
def test_a_fold_that_shrinks_or_grows_stops_being_compact(fold: Fold) -> None:
    """Each rule decides for some blueprint at some size, so that all limits are crossed."""
    rng = np.random.default_rng(1)
    count = 0
    while count < 6:
        blueprint = draw_blueprint(fold, rng)
        atoms = backbones.build(blueprint.torsions[None])[0]
        if not any(is_compact(blueprint, atoms * size) for size in (0.95, 1.02, 1.09)):
            continue
        answers = [is_compact(blueprint, atoms * size) for size in SIZES]
        assert answers == [is_compact_by_pairs(blueprint, atoms * size) for size in SIZES]
        count += 1
        assert not all(answers)


# ---- dimers


def test_docking_stops_at_the_first_contact() -> None:
    """One pair of atoms is exactly at its limit, and none is below."""
    limits = np.full((5, 5), 3.0)
    limits[np.ix_([0, 3], [0, 3])] = 2.6
    limits[1, 1], limits[4, 4] = 5.5, 4.5
    for index in (2, 4):
        sample = protein(index)
        docked = dock([sample.blueprint] * 2, [backbone_of(sample)] * 2, np.random.default_rng(3))
        assert docked is not None
        n = len(docked) // 2
        apart = np.linalg.norm(docked[:n, :, None, None] - docked[None, None, n:], axis=-1)
        assert (apart - limits[None, :, None, :]).min() == pytest.approx(0.0, abs=1e-9)
        assert (apart[:, 4, :, 4] < 8.0).sum() >= 10
        # The chain is centred, its first helix is along x, and its face looks to the other chain.
        np.testing.assert_allclose(docked[:n, 1].mean(0), 0.0, atol=1e-9)
        ca, bodies = docked[:n, 1], sample.blueprint.bodies
        helix = ca[bodies == 0] if (bodies == 0).any() else ca[bodies >= 0]
        axis = helix[len(helix) // 2 :].mean(0) - helix[: len(helix) // 2].mean(0)
        np.testing.assert_allclose(axis[1:], 0.0, atol=1e-9)
        assert axis[0] > 0
        assert docked[n:, 1, 2].mean() > docked[:n, 1, 2].max()


def test_equal_chains_have_equal_sites() -> None:
    """A pair across the interface becomes one of the chain, the first of two in conflict counts."""
    preferences, fixed = np.arange(120.0).reshape(6, 20), np.array([True, False, False, True, False, False])
    pairs = [(0, 3), (1, 5), (4, 2), (0, 2), (2, 3)]
    couplings = [np.full((20, 20), float(k)) for k in range(5)]
    tied = tie_sites(Sites(preferences, fixed, pairs, couplings), 3)
    np.testing.assert_array_equal(tied.preferences, preferences[:3])
    assert tied.fixed.tolist() == [True, False, False]
    # (0, 3) is a residue and its own copy. (4, 2) and (2, 3) share a residue with (1, 5).
    assert tied.pairs == [(1, 2)]
    assert [coupling[0, 0] for coupling in tied.couplings] == [1.0]
    free = tie_sites(Sites(preferences, fixed, [(0, 4), (1, 2), (5, 2)], couplings[:3]), 3)
    assert free.pairs == [(0, 1)]


def test_a_homodimer_does_not_depend_on_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two contacts of a symmetric pair are equal but for rounding, which differs between machines."""
    wanted_dimers = {index: dimer(index) for index in (0, 2, 4)}
    rng = np.random.default_rng(1)
    burial = sequence._count_burial

    def noisy_burial(ca: np.ndarray, cb: np.ndarray) -> np.ndarray:
        exact = burial(ca, cb)
        return exact + 1e-9 * rng.standard_normal(exact.shape)

    def noisy(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        exact = backbones.distances(a, b)
        return exact + 1e-9 * rng.standard_normal(exact.shape)

    for module in (dimers, proteins, sequence, sidechain):
        monkeypatch.setattr(module, "distances", noisy, raising=False)
    monkeypatch.setattr(sequence, "_count_burial", noisy_burial)
    for index, wanted in wanted_dimers.items():
        again = make_dimer(7, index, 30, 38, (16, 24))
        assert again[0].sequence == wanted[0].sequence
        np.testing.assert_array_equal(again[0].alignment.rows, wanted[0].alignment.rows)


def test_residues_of_two_chains_are_not_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of the second chain do not continue those of the first."""
    numbers: list[list[int]] = []

    def choose(letters: object, backbone: object, number: np.ndarray, symmetric: bool) -> tuple[list[int], list]:
        numbers.append(number.tolist())
        return [0] * len(number), []

    monkeypatch.setattr(sidechain, "_choose_rotamers", choose)
    backbone = backbone_of(protein(2))
    n = len(backbone)
    for second in (None, 10):
        assert add_side_chains("A" * n, backbone, np.zeros(n, bool), second=second) is not None
    assert numbers == [list(range(n)), [*range(10), *range(10 + n, 2 * n)]]


def test_a_chain_is_centred_and_numbered_from_one() -> None:
    sample = protein(3)
    chain = to_chain(sample)
    np.testing.assert_allclose(chain.positions[:, 1].mean(0), 0.0, atol=1e-5)
    assert (chain.id, chain.sequence, chain.author_numbers) == ("A", sample.sequence, tuple(map(str, range(1, 31))))
    assert chain.residue_index.tolist() == list(range(30))
    assert chain.mask.sum() == (np.abs(sample.atoms).sum(-1) > 0).sum() + (np.abs(sample.atoms[0, 0]).sum() == 0)
    moved = to_chain(sample, "B", np.array([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(moved.positions[:, 1], sample.atoms[:, 1] - [1, 2, 3], atol=1e-5)
    assert (moved.positions[moved.mask == 0] == 0).all()


def record() -> None:
    """Print the tables of this file."""
    tables: Sequence[tuple[str, object]] = (
        ("PROTEINS", recorded_proteins()),
        ("DIMERS", recorded_dimers()),
        ("CROWDS", recorded_crowds()),
        ("ROTAMER_ATOMS", recorded_rotamers()),
        ("FOLD_COUNTS", recorded_folds()),
    )
    for name, table in tables:
        print(f"{name} = ", end="")
        pprint(table, width=118, sort_dicts=False)


if __name__ == "__main__":
    record()
