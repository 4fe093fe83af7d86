"""Minimise the energy of proteins in Amber's force field with OpenMM, their heavy atoms held by springs (Supp. 1.8.6).

The only place that knows OpenMM, which is an optional extra.  It counts in nanometers and kJ/mol; what goes in and out
of this file is in angstrom and kcal/mol.
"""

import importlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from warpfold.errors import UserError
from warpfold.geometry.residue import ATOM_ORDER, ATOM_TYPES, RESTYPE_3, RESTYPES
from warpfold.keyed import keyed_rng

FORCE_FIELD = "amber99sb.xml"  # Amber ff99SB, without solvent
STIFFNESS = 10.0  # kcal/mol/Å² of each spring (Supp. 1.8.6)
TOLERANCE = 10.0  # kJ/mol/nm: AlphaFold's 2.39 kcal/mol, as OpenMM reads it: the root mean square of the forces
PH = 7.0
KCAL = 4.184  # kJ
SPRING = STIFFNESS * KCAL * 100  # kJ/mol/nm²
MAX_STEPS = 10_000  # of one minimisation, where rounding keeps it from the tolerance; some hundreds are usual
STRAINED = 100.0  # kcal/mol for each residue, above which atoms are first pushed apart by soft contacts
SHAKE = 0.02  # Å: atoms at one place have no direction in which to part
SOFT = 50_000.0  # kJ/mol/nm²: a tenth of the spring of a bond, so that no atom is torn from its neighbour
SOFT_RANGE = 0.4  # nm; contacts begin below it
SOFT_STEPS = 300
SPRINGS = 1  # OpenMM's number for this group of forces; the force field is group 0
OXT = ATOM_ORDER["OXT"]


@dataclass(frozen=True)
class ModelledResidues:
    """Residues of all chains in a row: R of them, atoms in the 37 places of `ATOM_TYPES`, angstrom."""

    sequence: str
    positions: np.ndarray  # float [R, 37, 3]
    mask: np.ndarray  # bool [R, 37]
    segment: np.ndarray  # int [R]: residues of a number follow one another and are bonded; -1: takes no part


class Amber:
    """The residues in the force field, with hydrogens, on one of OpenMM's platforms.

    Every residue of a segment must have all heavy atoms of its type.  Cysteines whose SG are nearer than 3 Å are
    bonded, as in AlphaFold; histidines get the hydrogen that makes a hydrogen bond, on ND1 where none does.
    Errors: UserError without OpenMM, or if it has no platform that works.
    """

    def __init__(self, residues: ModelledResidues, built: np.ndarray, device: str = "cpu") -> None:
        """built: bool [R, 37], atoms that no spring holds, since nobody has seen where they are."""
        self._mm, self._app = require_openmm(), importlib.import_module("openmm.app")
        self._mm.Platform.getPlatformByName("CPU").setPropertyDefaultValue("DeterministicForces", "true")
        topology, self._places = self._with_hydrogens(residues)  # [atoms, 3] in nanometers, hydrogens too
        rows = np.flatnonzero(residues.segment >= 0)
        atoms = [(rows[atom.residue.index], ATOM_ORDER.get(atom.name, -1)) for atom in topology.atoms()]
        self._row, self._atom = np.array(atoms).T  # [atoms]: of `residues`, and place in it, -1 for hydrogens
        self._kept = (self._atom >= 0) & residues.mask[self._row, self._atom]  # without the OXT that we added
        self._shape = residues.positions.shape
        self.disulfides = sum({a.name, b.name} == {"SG"} for a, b in topology.bonds())
        held = np.flatnonzero(self._kept & ~built[self._row, self._atom])
        amber = self._app.ForceField(FORCE_FIELD).createSystem(
            topology, nonbondedMethod=self._app.NoCutoff, removeCMMotion=False
        )
        soft = self._with_soft_contacts(amber)
        self._amber = Held(self._mm, amber, held, device)
        self._soft = Held(self._mm, soft, held, device)
        self.platform = self._amber.platform

    def energy(self) -> float:
        """Return the energy of the force field in kcal/mol, without the springs; infinite if it is not a number."""
        return self._amber.energy(self._places)

    def positions(self) -> np.ndarray:
        """Return the heavy atoms [R, 37, 3] in angstrom, 0 where an atom is not in the force field."""
        found = np.zeros(self._shape)
        found[self._row[self._kept], self._atom[self._kept]] = 10 * self._places[self._kept]
        return found

    def minimise(self, free: np.ndarray) -> None:
        """Move all atoms to a minimum of the energy; springs hold the heavy atoms where they are now.

        free: bool [R], residues without springs.  Where atoms overlap so much that the energy of the force field is
        huge, its contacts, whose forces have no limit, are first replaced by soft ones: a minimisation that begins at
        such energies ends with atoms caught on the wrong side of each other.
        """
        anchors, loose = self._places, free[self._row]
        if self.energy() > STRAINED * len(np.unique(self._row)):
            shake = keyed_rng(0, "relax").normal(0, SHAKE / 10, anchors.shape)
            self._places = self._soft.minimise(anchors + shake, anchors, loose, SOFT_STEPS)
        self._places = self._amber.minimise(self._places, anchors, loose, MAX_STEPS)

    def _with_hydrogens(self, residues: ModelledResidues) -> tuple[Any, np.ndarray]:
        """Return OpenMM's topology of all segments and the positions, with hydrogens and the oxygens of the ends."""
        topology, places, last = self._app.Topology(), [], -1
        chain = None
        for row in np.flatnonzero(residues.segment >= 0):
            if chain is None or residues.segment[row] != last:
                chain, last = topology.addChain(), residues.segment[row]
            residue = topology.addResidue(RESTYPE_3[RESTYPES.index(residues.sequence[row])], chain)
            is_end = row + 1 == len(residues.segment) or residues.segment[row + 1] != last
            for atom in np.flatnonzero(residues.mask[row]):
                if atom != OXT:
                    name = ATOM_TYPES[atom]
                    topology.addAtom(name, self._app.Element.getBySymbol(name[0]), residue)
                    places.append(residues.positions[row, atom])
            if is_end:
                topology.addAtom("OXT", self._app.Element.getBySymbol("O"), residue)
                has_one = residues.mask[row, OXT]
                places.append(residues.positions[row, OXT] if has_one else end_oxygen(residues.positions[row]))
        nanometer = importlib.import_module("openmm.unit").nanometer
        positions = [self._mm.Vec3(*map(float, place)) for place in np.array(places) / 10] * nanometer
        topology.createStandardBonds()
        topology.createDisulfideBonds(positions)
        modeller = self._app.Modeller(topology, positions)
        with _same_random_numbers():
            # Without the force field: its forces have no limit, and atoms may be at one place.
            modeller.addHydrogens(pH=PH, platform=self._mm.Platform.getPlatformByName("CPU"))
        return modeller.topology, np.array(modeller.positions.value_in_unit(nanometer))

    def _with_soft_contacts(self, amber: Any) -> Any:
        """Return a copy of a system in which atoms that overlap repel each other, and charges do not act."""
        system = self._mm.XmlSerializer.clone(amber)
        places = range(system.getNumForces())
        place = next(i for i in places if isinstance(system.getForce(i), self._mm.NonbondedForce))
        contacts = system.getForce(place)
        soft = self._mm.CustomNonbondedForce(f"0.5*{SOFT}*max(0, 0.45*(s1+s2)-r)^2")  # from 0.9 sigma on
        soft.addPerParticleParameter("s")
        soft.setNonbondedMethod(self._mm.CustomNonbondedForce.CutoffNonPeriodic)
        soft.setCutoffDistance(SOFT_RANGE)
        for i in range(contacts.getNumParticles()):
            _, sigma, epsilon = (quantity._value for quantity in contacts.getParticleParameters(i))
            soft.addParticle([sigma if epsilon > 0 else 0.0])
        for i in range(contacts.getNumExceptions()):
            soft.addExclusion(*contacts.getExceptionParameters(i)[:2])
        system.addForce(soft)
        system.removeForce(place)
        return system


class Held:
    """A system of OpenMM with springs at some atoms, open on a platform; lengths in nanometers."""

    def __init__(self, openmm: Any, system: Any, held: np.ndarray, device: str) -> None:
        """held: the atoms that have springs.  Errors: UserError if no platform works."""
        self._mm, self._held = openmm, held.tolist()
        self._springs = openmm.CustomExternalForce("0.5*k*((x-x0)^2+(y-y0)^2+(z-z0)^2)")
        for name in ("k", "x0", "y0", "z0"):
            self._springs.addPerParticleParameter(name)
        for atom in self._held:
            self._springs.addParticle(atom, [0.0] * 4)
        self._springs.setForceGroup(SPRINGS)
        system.addForce(self._springs)
        self._context, self.platform = open_context(openmm, system, device)

    def energy(self, places: np.ndarray) -> float:
        """Return the energy without the springs, kcal/mol; infinite if it is not a number."""
        self._context.setPositions(places)
        energy = float(self._context.getState(getEnergy=True, groups={0}).getPotentialEnergy()._value) / KCAL
        return energy if np.isfinite(energy) else np.inf

    def minimise(self, places: np.ndarray, anchors: np.ndarray, loose: np.ndarray, steps: int) -> np.ndarray:
        """Return the atoms at a minimum, found from `places`, with springs to `anchors` but at `loose` atoms."""
        for i, atom in enumerate(self._held):
            self._springs.setParticleParameters(i, atom, [0.0 if loose[atom] else SPRING, *anchors[atom].tolist()])
        self._springs.updateParametersInContext(self._context)
        self._context.setPositions(places)
        self._mm.LocalEnergyMinimizer.minimize(self._context, TOLERANCE, steps)
        return np.array(self._context.getState(getPositions=True).getPositions(asNumpy=True)._value)


def open_context(openmm: Any, system: Any, device: str) -> tuple[Any, str]:
    """Return a context on the fastest platform that works for a device; its name, and why the faster ones do not.

    Errors: UserError if none works.
    """
    kind, _, number = device.partition(":")
    reasons: list[str] = []
    for name in ("CPU",) if kind == "cpu" else ("CUDA", "HIP", "OpenCL", "CPU"):
        properties = {"DeterministicForces": "true"}
        if name != "CPU":
            properties |= {"Precision": "mixed"} | ({"DeviceIndex": number} if number else {})
        try:
            platform = openmm.Platform.getPlatformByName(name)
            integrator = openmm.VerletIntegrator(0.001)  # never steps; a context must have one
            context = openmm.Context(system, integrator, platform, properties)
        except openmm.OpenMMException as error:
            reasons.append(f"{name}: {' '.join(str(error).split())}")
            continue
        return context, name + (f" ({'; '.join(reasons)})" if reasons else "")
    raise UserError(f"--device {device}: OpenMM cannot use it ({'; '.join(reasons)}); give another, or cpu")


def require_openmm() -> Any:
    """Return the module.  Errors: UserError, which says how to get it, where it is not installed."""
    try:
        return importlib.import_module("openmm")
    except ImportError:
        raise UserError(
            'relaxation needs OpenMM, which is not installed; pip install "warpfold[relax]", or "openmm[cuda12]" '
            "beside it for NVIDIA GPUs"
        ) from None


def end_oxygen(atoms: np.ndarray) -> np.ndarray:
    """Place the second oxygen of a chain's end: atoms [37, 3] of its last residue -> [3], angstrom."""
    ca, c, o = (atoms[ATOM_ORDER[name]].astype(float) for name in ("CA", "C", "O"))
    outwards = np.array([1e-3, 2e-3, 3e-3])  # three bonds in a plane, 120 degrees apart, add up to zero
    for neighbour in (ca, o):
        outwards = outwards - (neighbour - c) / max(float(np.linalg.norm(neighbour - c)), 1e-3)
    return c + 1.25 * outwards / np.linalg.norm(outwards)


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Make what draws from Python's generator, as OpenMM does where hydrogens begin, the same each time."""
    state = random.getstate()
    random.seed(0)
    try:
        yield
    finally:
        random.setstate(state)
