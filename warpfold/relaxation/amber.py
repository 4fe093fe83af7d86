"""Minimise the energy of proteins in the Amber force field with OpenMM and restrained heavy atoms (Supp. 1.8.6).

Only this module uses OpenMM, which is an optional extra. OpenMM's units are nanometers and kJ/mol; the arguments and
results of the functions are in angstrom and kcal/mol.
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

# Amber ff99SB without solvent.
FORCE_FIELD = "amber99sb.xml"
PH = 7.0
# kJ in a kcal.
KCAL = 4.184
# Stiffness of the restraints: 10 kcal/mol/Å² (Supp. 1.8.6), in kJ/mol/nm².
RESTRAINT = 10.0 * KCAL * 100
# Convergence: the root mean square force in kJ/mol/nm. AlphaFold passes 2.39 kcal/mol, which OpenMM reads as this.
TOLERANCE = 10.0
# Rounding may keep a minimisation from converging. A few hundred steps are usual.
MAX_STEPS = 10_000
# Energy in kcal/mol per residue above which soft contacts separate the atoms first.
STRAINED_ENERGY = 100.0
# Random displacement in Å: two atoms at the same position have no direction in which to separate.
JITTER = 0.02
# Soft contacts: stiffness in kJ/mol/nm², a tenth of a bond's so that no bond breaks, and their range in nm.
SOFT_STIFFNESS = 50_000.0
SOFT_RANGE = 0.4
SOFT_STEPS = 300
# OpenMM's group of the restraints. The force field is group 0.
RESTRAINT_GROUP = 1
OXT = ATOM_ORDER["OXT"]


@dataclass(frozen=True)
class ModelledResidues:
    """The R residues of all chains, concatenated.

    positions: float [R, 37, 3], angstrom, in the order of `ATOM_TYPES`. mask: bool [R, 37]. segment: int [R];
    consecutive residues of one segment are bonded, and residues of segment -1 are not modelled.
    """

    sequence: str
    positions: np.ndarray
    mask: np.ndarray
    segment: np.ndarray


class Amber:
    """Residues with hydrogens in the force field, on one of OpenMM's platforms.

    Every residue of a segment must have all heavy atoms of its type. Cysteines whose SG are nearer than 3 Å are bonded,
    as in AlphaFold. Histidines get the hydrogen that forms a hydrogen bond, by default that on ND1.
    built: bool [R, 37], atoms without restraints because their positions were not observed.
    Raises UserError if OpenMM is missing or none of its platforms works.
    """

    def __init__(self, residues: ModelledResidues, built: np.ndarray, device: str = "cpu") -> None:
        self._mm, self._app = require_openmm(), importlib.import_module("openmm.app")
        self._mm.Platform.getPlatformByName("CPU").setPropertyDefaultValue("DeterministicForces", "true")
        # [atoms, 3] in nanometers, including hydrogens.
        topology, self._coordinates = self._with_hydrogens(residues)
        rows = np.flatnonzero(residues.segment >= 0)
        atoms = [(rows[atom.residue.index], ATOM_ORDER.get(atom.name, -1)) for atom in topology.atoms()]
        # [atoms]: the residue and the index in `ATOM_TYPES`, which is -1 for hydrogens.
        self._row, self._atom = np.array(atoms).T
        # The atoms of the input: no hydrogens and no added OXT.
        self._is_input = (self._atom >= 0) & residues.mask[self._row, self._atom]
        self._shape = residues.positions.shape
        self.disulfides = sum({a.name, b.name} == {"SG"} for a, b in topology.bonds())
        restrained = np.flatnonzero(self._is_input & ~built[self._row, self._atom])
        amber = self._app.ForceField(FORCE_FIELD).createSystem(
            topology, nonbondedMethod=self._app.NoCutoff, removeCMMotion=False
        )
        soft = self._with_soft_contacts(amber)
        self._amber = RestrainedSystem(self._mm, amber, restrained, device)
        self._soft = RestrainedSystem(self._mm, soft, restrained, device)
        self.platform = self._amber.platform

    def energy(self) -> float:
        """Compute the energy of the force field in kcal/mol, without restraints; infinite if it is not a number."""
        return self._amber.energy(self._coordinates)

    def positions(self) -> np.ndarray:
        """Return the heavy atoms [R, 37, 3] in angstrom; 0 for atoms that are not in the force field."""
        positions = np.zeros(self._shape)
        positions[self._row[self._is_input], self._atom[self._is_input]] = 10 * self._coordinates[self._is_input]
        return positions

    def minimise(self, free: np.ndarray) -> None:
        """Move all atoms to a minimum of the energy, with restraints to the present positions of the heavy atoms.

        free: bool [R], residues without restraints.
        If atoms overlap so much that the energy is huge, soft contacts separate them first. Contacts of the force field
        have unbounded forces, and a minimisation that starts with them leaves atoms on the wrong side of each other.
        """
        anchors, is_free = self._coordinates, free[self._row]
        if self.energy() > STRAINED_ENERGY * len(np.unique(self._row)):
            jitter = keyed_rng(0, "relax").normal(0, JITTER / 10, anchors.shape)
            self._coordinates = self._soft.minimise(anchors + jitter, anchors, is_free, SOFT_STEPS)
        self._coordinates = self._amber.minimise(self._coordinates, anchors, is_free, MAX_STEPS)

    def _with_hydrogens(self, residues: ModelledResidues) -> tuple[Any, np.ndarray]:
        """Build OpenMM's topology and the coordinates of all segments, with hydrogens and terminal oxygens."""
        topology, coordinates, last = self._app.Topology(), [], -1
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
                    coordinates.append(residues.positions[row, atom])
            if is_end:
                topology.addAtom("OXT", self._app.Element.getBySymbol("O"), residue)
                has_oxt = residues.mask[row, OXT]
                coordinates.append(residues.positions[row, OXT] if has_oxt else end_oxygen(residues.positions[row]))
        nanometer = importlib.import_module("openmm.unit").nanometer
        positions = [self._mm.Vec3(*map(float, xyz)) for xyz in np.array(coordinates) / 10] * nanometer
        topology.createStandardBonds()
        topology.createDisulfideBonds(positions)
        modeller = self._app.Modeller(topology, positions)
        with _same_random_numbers():
            # No force field here: atoms may coincide, where its forces are unbounded.
            modeller.addHydrogens(pH=PH, platform=self._mm.Platform.getPlatformByName("CPU"))
        return modeller.topology, np.array(modeller.positions.value_in_unit(nanometer))

    def _with_soft_contacts(self, amber: Any) -> Any:
        """Copy a system and replace contacts and charges by a soft repulsion of overlapping atoms."""
        system = self._mm.XmlSerializer.clone(amber)
        numbers = range(system.getNumForces())
        number = next(i for i in numbers if isinstance(system.getForce(i), self._mm.NonbondedForce))
        contacts = system.getForce(number)
        # The repulsion starts at 0.9 sigma, where sigma is (s1 + s2) / 2.
        soft = self._mm.CustomNonbondedForce(f"0.5*{SOFT_STIFFNESS}*max(0, 0.45*(s1+s2)-r)^2")
        soft.addPerParticleParameter("s")
        soft.setNonbondedMethod(self._mm.CustomNonbondedForce.CutoffNonPeriodic)
        soft.setCutoffDistance(SOFT_RANGE)
        for i in range(contacts.getNumParticles()):
            _, sigma, epsilon = (quantity._value for quantity in contacts.getParticleParameters(i))
            soft.addParticle([sigma if epsilon > 0 else 0.0])
        for i in range(contacts.getNumExceptions()):
            soft.addExclusion(*contacts.getExceptionParameters(i)[:2])
        system.addForce(soft)
        system.removeForce(number)
        return system


class RestrainedSystem:
    """An OpenMM system with harmonic restraints on some atoms, open on a platform; lengths in nanometers.

    restrained: indices of the atoms. Raises UserError if no platform works.
    """

    def __init__(self, openmm: Any, system: Any, restrained: np.ndarray, device: str) -> None:
        self._mm, self._restrained = openmm, restrained.tolist()
        self._restraints = openmm.CustomExternalForce("0.5*k*((x-x0)^2+(y-y0)^2+(z-z0)^2)")
        for name in ("k", "x0", "y0", "z0"):
            self._restraints.addPerParticleParameter(name)
        for atom in self._restrained:
            self._restraints.addParticle(atom, [0.0] * 4)
        self._restraints.setForceGroup(RESTRAINT_GROUP)
        system.addForce(self._restraints)
        self._context, self.platform = open_context(openmm, system, device)

    def energy(self, coordinates: np.ndarray) -> float:
        """Compute the energy without restraints in kcal/mol; infinite if it is not a number."""
        self._context.setPositions(coordinates)
        energy = float(self._context.getState(getEnergy=True, groups={0}).getPotentialEnergy()._value) / KCAL
        return energy if np.isfinite(energy) else np.inf

    def minimise(self, start: np.ndarray, anchors: np.ndarray, is_free: np.ndarray, steps: int) -> np.ndarray:
        """Minimise the energy from `start` with restraints to `anchors`, except for free atoms; returns coordinates."""
        for i, atom in enumerate(self._restrained):
            stiffness = 0.0 if is_free[atom] else RESTRAINT
            self._restraints.setParticleParameters(i, atom, [stiffness, *anchors[atom].tolist()])
        self._restraints.updateParametersInContext(self._context)
        self._context.setPositions(start)
        self._mm.LocalEnergyMinimizer.minimize(self._context, TOLERANCE, steps)
        return np.array(self._context.getState(getPositions=True).getPositions(asNumpy=True)._value)


def open_context(openmm: Any, system: Any, device: str) -> tuple[Any, str]:
    """Open a context on the fastest platform that works; returns its name with the errors of faster platforms.

    Raises UserError if none works.
    """
    kind, _, number = device.partition(":")
    reasons: list[str] = []
    for name in ("CPU",) if kind == "cpu" else ("CUDA", "HIP", "OpenCL", "CPU"):
        properties = {"DeterministicForces": "true"}
        if name != "CPU":
            properties |= {"Precision": "mixed"} | ({"DeviceIndex": number} if number else {})
        try:
            platform = openmm.Platform.getPlatformByName(name)
            # A context needs an integrator, which never steps here.
            integrator = openmm.VerletIntegrator(0.001)
            context = openmm.Context(system, integrator, platform, properties)
        except openmm.OpenMMException as error:
            reasons.append(f"{name}: {' '.join(str(error).split())}")
            continue
        return context, name + (f" ({'; '.join(reasons)})" if reasons else "")
    raise UserError(f"--device {device}: OpenMM cannot use it ({'; '.join(reasons)}); give another, or cpu")


def require_openmm() -> Any:
    """Import OpenMM. Raises UserError with instructions if it is not installed."""
    try:
        return importlib.import_module("openmm")
    except ImportError:
        raise UserError(
            'relaxation: OpenMM is not installed. Run pip install ".[relax]", and on NVIDIA GPUs also '
            'pip install "openmm[cuda12]"'
        ) from None


def end_oxygen(atoms: np.ndarray) -> np.ndarray:
    """Compute the position of the second oxygen of a terminal residue with atoms [37, 3]: [3], angstrom."""
    ca, c, o = (atoms[ATOM_ORDER[name]].astype(float) for name in ("CA", "C", "O"))
    # Three planar bonds 120 degrees apart add up to zero, so the third points away from the others. The small start
    # gives a direction even if the two bonds cancel.
    outwards = np.array([1e-3, 2e-3, 3e-3])
    for neighbour in (ca, o):
        outwards = outwards - (neighbour - c) / max(float(np.linalg.norm(neighbour - c)), 1e-3)
    return c + 1.25 * outwards / np.linalg.norm(outwards)


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Seed Python's generator within the context: OpenMM draws the first positions of hydrogens from it."""
    state = random.getstate()
    random.seed(0)
    try:
        yield
    finally:
        random.setstate(state)
