"""Read reference cases of the official code, compute them with WarpFold, and compare array by array.

The layout, all of it optional (README.md says what each file holds):

    models/<case>/{config,param_spec,noise_fp32_vs_fp64}.json, {features,outputs,params,grads}.npz
    models_design/<case>/ likewise, with cot.npz, grads_in.npz and, of an initial guess, prev.npz in place of grads.npz
    units/<case>.{json,npz}, losses/<case>.{json,npz}, geometry/<case>.{json,npz}, confidences/<case>.{json,npz}

A missing or truncated file raises the error of Python, json or NumPy, which `run.run_case` reports. The cases are
computed in geometry.py (geometry and losses), layers.py (layers, blocks, the structure module), multimer.py, models.py,
and design.py (gradients with respect to a sequence).

The criterion for two arrays:

* With a stated error of the official fp32 run against fp64: max |ours - theirs| <= 10 * error + 1e-6 * scale.
* Without a stated error: |ours - theirs|_2 / |theirs|_2 <= 1e-4.

Only valid entries count (masks of the case).
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from warpfold.batch import Arrays
from warpfold.errors import UserError
from warpfold.model.weights.deepmind import arrays, from_deepmind

KINDS = ("geometry", "losses", "units", "confidences", "models", "models_design")
COMPARED = ("out", "grad_in", "grad_params", "grad_params_sample", "grad_params_l2")
TIMES_NOISE = 10.0
OF_SCALE = 1e-6
RELATIVE_L2 = 1e-4
UNSTATED = 9e-7  # unstated noise of input gradients, relative
UNDEFINED_ABOVE, ZERO_ABOVE = 1e-2, 10.0
# A gradient smaller than this fraction of the case's largest one is fp32 rounding of an exact zero (for example that of
# an offset added to all logits of a softmax): without stated noise, ours only has to be as small.
RESOLVED, ZERO = 1e-7, "the exact gradient is 0"

Module = TypeVar("Module", bound=nn.Module)
Tensors = dict[str, Tensor]
# Reading


class BrokenCase(UserError):
    """A reference case that cannot be read. The message names the file and the problem."""


@dataclass(frozen=True)
class RoundingNoise:
    """The difference of the stored fp32 run of the official code from its fp64 run, for one array."""

    max_abs_diff: float
    max_abs: float


@dataclass(frozen=True)
class CaseFiles:
    """The files of one case. `name` is their path below the folder, without suffix; `kind` is one of KINDS."""

    kind: str
    name: str
    path: Path  # the folder of a whole model; else the path of json and npz, without suffix


@dataclass(frozen=True)
class ReferenceCase:
    """One reference case, as read.

    inputs:     `in/*` of a unit, or the features of a whole model.
    params:     by DeepMind's names `scope//name`.
    cotangents: by output; the gradients are those of sum over outputs of sum(output * cotangent).
    expected:   arrays to compare, by `out/*`, `grad_in/*`, `grad_params/*`, `grad_params_sample/*`, `grad_params_l2/*`.
    samples:    flat indices at which `grad_params_sample` was taken, by parameter.
    noise:      by the names of `expected`, if stated.
    """

    name: str
    kind: str
    meta: dict[str, Any]
    inputs: Arrays
    expected: Arrays
    params: Arrays = field(default_factory=dict)
    cotangents: Arrays = field(default_factory=dict)
    samples: Arrays = field(default_factory=dict)
    noise: dict[str, RoundingNoise] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """Return the official configuration of the module or model (empty where the case needs none)."""
        return self.meta.get("config") or {}

    @property
    def title(self) -> str:
        """Return the last component of the name."""
        return self.name.rsplit("/", 1)[-1]

    def asks(self, group: str) -> list[str]:
        """Return the names of the expected arrays of one group, such as "grad_in" -> inputs that require gradients."""
        return [name.split("/", 1)[1] for name in self.expected if name.split("/", 1)[0] == group]


def find(folder: Path) -> list[CaseFiles]:
    """Find the cases at or below `folder`, geometry first, whole models last. Raises UserError if there are none."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give one that holds models/, units/, losses/ or geometry/")
    found: dict[tuple[int, str], CaseFiles] = {}
    top = folder.resolve()
    for path in sorted([top, *top.rglob("*")]):
        if path.is_dir() and path.parent.name == "models_design":
            kind, stem = "models_design", path
        elif path.is_dir() and (path.parent.name == "models" or (path == top and (path / "config.json").is_file())):
            kind, stem = "models", path
        elif path.suffix in (".json", ".npz") and path.parent.name in KINDS[:-2]:
            kind, stem = path.parent.name, path.with_suffix("")
        else:
            continue
        name = stem.relative_to(top).as_posix() if stem != top else stem.name
        name = name if "/" in name else f"{kind}/{name}"
        found[KINDS.index(kind), name] = CaseFiles(kind, name, stem)
    if not found:
        raise UserError(f"{folder}: no reference case; expected models/, units/, losses/ or geometry/ in it")
    return [found[key] for key in sorted(found)]


def read(files: CaseFiles) -> ReferenceCase:
    """Read a case. Raises errors of json and NumPy, and BrokenCase for a unit without inputs or outputs."""
    return _read_model(files) if files.kind in ("models", "models_design") else _read_unit(files)


def _read_unit(files: CaseFiles) -> ReferenceCase:
    meta = _json(files.path.with_name(files.path.name + ".json"))
    path = files.path.with_name(files.path.name + ".npz")
    arrays = _npz(path)
    groups: dict[str, Arrays] = {}
    for key, array in arrays.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = array
    if not groups.get("in") or not groups.get("out"):
        raise BrokenCase(f"{path}: holds no {'in' if not groups.get('in') else 'out'}/* arrays")
    return ReferenceCase(
        name=files.name,
        kind=files.kind,
        meta=meta,
        inputs=groups["in"],
        expected={f"{group}/{name}": x for group in COMPARED for name, x in groups.get(group, {}).items()},
        params=_params(groups.get("params"), meta.get("param_spec")),
        cotangents=groups.get("cot", {}),
        samples=groups.get("grad_params_sample_idx", {}),
        noise=_noise(meta.get("noise_fp32_vs_fp64"), ""),
    )


def _read_model(files: CaseFiles) -> ReferenceCase:
    folder = files.path

    def optional(name: str) -> Any:
        path = folder / name
        return (_npz(path) if path.suffix == ".npz" else _json(path)) if path.exists() else None

    meta = _json(folder / "config.json")
    stored = optional("params.npz")
    spec = _json(folder / "param_spec.json") if stored is None else optional("param_spec.json")
    expected = {"out": _npz(folder / "outputs.npz"), "grad_params": optional("grads.npz") or {}}
    expected["grad_in"] = optional("grads_in.npz") or {}
    noise = _noise(optional("noise_fp32_vs_fp64.json"), "out/")
    for name, x in expected["grad_in"].items():
        most = float(np.abs(x).max())
        noise[f"grad_in/{name}"] = noise.pop(f"out/grads_in/{name}", RoundingNoise(UNSTATED * most, most))
    return ReferenceCase(
        name=files.name,
        kind=files.kind,
        meta=meta,
        inputs=_npz(folder / "features.npz") | (optional("prev.npz") or {}),
        expected={f"{group}/{name}": x for group, arrays in expected.items() for name, x in arrays.items()},
        params=_params(stored, spec),
        cotangents=optional("cot.npz") or {},
        noise=noise,
    )


def _params(stored: Arrays | None, spec: Mapping[str, Any] | None) -> Arrays:
    """Return the stored parameters, or compute them from their recipe.

    The recipe: center + std * RandomState(seed).standard_normal(shape), rounded to float32.
    """
    if stored is not None:
        return stored
    made: Arrays = {}
    for name, recipe in (spec or {}).items():
        draw = np.random.RandomState(recipe["seed"]).standard_normal(tuple(recipe["shape"]))
        made[name] = (recipe["center"] + recipe["std"] * draw).astype(np.float32)
    return made


def _noise(stated: Mapping[str, Any] | None, prefix: str) -> dict[str, RoundingNoise]:
    """Return the noise by the names of `expected`, without entries of another form (sums over all gradients)."""
    return {
        prefix + name: RoundingNoise(float(entry["max_abs_diff"]), float(entry["max_abs"]))
        for name, entry in (stated or {}).items()
        if isinstance(entry, dict)
    }


def _json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def _npz(path: Path) -> Arrays:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


# Comparing


@dataclass(frozen=True)
class CaseOutputs:
    """WarpFold's results for one case, and how to compare them.

    outputs:     by the reference's names, attached to the graph.
    module:      the module whose parameters' gradients are compared. None: no parameters.
    scope:       prefix of DeepMind's names of its parameters, as in `load`.
    inputs:      of the computation, by name. Those with an expected gradient are leaves.
    objective:   the scalar to differentiate. None: the sum of output * cotangent.
    valid:       boolean masks over leading axes, by `out/*` or `grad_in/*`. Without one, all entries count.
    quaternions: names (as in `valid`) of arrays that begin with a quaternion, equal up to sign.
    rotations:   names of inputs [*, 3, 4], rotation and translation. Only the component of the gradient along changes
                 that preserve a rotation is compared, since others have no meaning.
    notes:       remarks for the table, by name.
    left_out:    expected arrays with conventions that WarpFold lacks.
    gradients:   by the names of `expected`, if the case computes them itself.
    """

    outputs: Mapping[str, Tensor]
    module: nn.Module | None = None
    scope: str | None = None
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    objective: Tensor | None = None
    valid: Mapping[str, Tensor] = field(default_factory=dict)
    quaternions: tuple[str, ...] = ()
    rotations: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    gradients: Mapping[str, Tensor] = field(default_factory=dict)


Compute = Callable[[ReferenceCase, Tensors], CaseOutputs]  # from a case and its inputs as tensors


@dataclass(frozen=True)
class Check:
    """The comparison of one array. `error` and `bound` are both absolute (measure "max") or both relative ("l2")."""

    what: str
    error: float
    bound: float
    measure: str
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.bound

    @property
    def ratio(self) -> float:
        """Return error over bound for sorting: 0 if both are 0, infinite if only the bound is."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound > 0 and math.isfinite(self.error) else math.inf


def tensors(case: ReferenceCase) -> Tensors:
    """Convert a unit's inputs to tensors: int64 and fp32, with leaves for the inputs in `grad_in`."""
    wanted = set(case.asks("grad_in"))
    inputs = {}
    for name, array in case.inputs.items():
        x = torch.from_numpy(np.array(array))
        x = x.float() if x.is_floating_point() else x.long()
        inputs[name] = x.requires_grad_() if name in wanted else x
    return inputs


def load(module: Module, case: ReferenceCase, scope: str | None = None) -> Module:
    """Load the case's parameters into `module`, and put it into eval mode.

    scope: prefix of DeepMind's names. None: their only scope.
    """
    from_deepmind(module, case.params, _scope(case) if scope is None else scope, source=case.name)
    return module.eval()


def _parameter_gradients(module: nn.Module, scope: str) -> dict[str, np.ndarray]:
    """Return the gradients of all parameters as DeepMind's arrays, with zeros for missing gradients."""
    parameters = dict(module.named_parameters())
    found: dict[str, np.ndarray] = {}
    for a in arrays(module, scope):
        parameter = parameters[a.ours]
        grad = a.to_theirs(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        if a.block is None:
            found[a.theirs] = grad
        else:  # one array for the blocks of a stack
            found.setdefault(a.theirs, np.zeros(a.stacked_shape, grad.dtype))[a.block] = grad
    return found


def _scope(case: ReferenceCase) -> str:
    scopes = sorted({name.partition("//")[0].partition("/")[0] for name in case.params})
    if len(scopes) != 1:
        raise BrokenCase(f"{case.name}: parameters in {len(scopes)} scopes {scopes[:3]}, one expected")
    return scopes[0]


def checks(case: ReferenceCase, result: CaseOutputs) -> list[Check]:
    """Compare all expected arrays. Raises BrokenCase, and ValueError for an array that WarpFold does not compute."""
    ours: dict[str, np.ndarray] = {f"out/{name}": _array(x) for name, x in result.outputs.items()}
    names = [name for name in case.expected if name.startswith("grad_")]
    if names:
        known = {name: _array(x) for name, x in result.gradients.items()}
        ours |= known or _gradients(case, result)
    found = []
    largest = max((float(np.abs(case.expected[name]).max(initial=0)) for name in names), default=0.0)
    for what, theirs in case.expected.items():
        if what in result.left_out:
            found.append(Check(what, 0.0, 0.0, "max", "another convention, which WarpFold does not have"))
            continue
        if what not in ours:
            raise ValueError(f"{what}: the reference has it, WarpFold gives none")
        x, noise = ours[what], case.noise.get(what)
        if what in result.quaternions and x.shape == theirs.shape:
            x = same_sign(x, theirs)
        if what.startswith("grad_in/") and what.removeprefix("grad_in/") in result.rotations:
            rigid = case.inputs[what.removeprefix("grad_in/")]
            x, theirs = (along_rotations(gradient, rigid) for gradient in (x, theirs))
        if what.startswith("grad_params_l2/"):
            found.append(_norm_check(case, what, x, theirs))
        elif noise is None and what.startswith("grad_") and np.abs(theirs).max(initial=0) <= RESOLVED * largest:
            found.append(Check(what, float(np.abs(x - theirs).max(initial=0)), RESOLVED * largest, "max", ZERO))
        else:
            valid = _array(result.valid[what]).astype(bool) if what in result.valid else None
            found.append(compare(what, x, theirs, noise, valid, result.notes.get(what, "")))
    return found


def _gradients(case: ReferenceCase, result: CaseOutputs) -> dict[str, np.ndarray]:
    """Run the backward pass, and return the gradients by the names of `ReferenceCase.expected`."""
    objective = result.objective
    if objective is None:  # the output that the case names, or the sum of output * cotangent
        objective = result.outputs.get(case.meta.get("grad_of") or "")
    if objective is None:
        if not case.cotangents:
            raise BrokenCase(f"{case.name}: has gradients but neither cotangents nor an output that 'grad_of' names")
        terms = [(result.outputs[name] * torch.from_numpy(one)).sum() for name, one in case.cotangents.items()]
        objective = torch.stack(terms).sum()
    objective.backward()
    ours: dict[str, np.ndarray] = {}
    for name in case.asks("grad_in"):
        leaf = result.inputs[name]
        ours[f"grad_in/{name}"] = _array(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
    if result.module is None:
        return ours
    scope = _scope(case) if result.scope is None else result.scope
    for name, array in _parameter_gradients(result.module, scope).items():
        ours[f"grad_params/{name}"] = array
        ours[f"grad_params_l2/{name}"] = np.asarray(np.linalg.norm(array.astype(np.float64)))
        if name in case.samples:
            ours[f"grad_params_sample/{name}"] = array.ravel()[case.samples[name]]
    return ours


def _norm_check(case: ReferenceCase, what: str, ours: np.ndarray, theirs: np.ndarray) -> Check:
    """Check to 1e-4 the norm of a parameter's gradient of which only a sample is stored.

    If the sample's noise shows that the exact gradient is zero, the norm is that of rounding, at most 10 * noise for
    each entry.
    """
    name = what.split("/", 1)[1]
    noise = case.noise.get(f"grad_params_sample/{name}")
    if noise is not None and noise.max_abs_diff > ZERO_ABOVE * noise.max_abs:
        bound = TIMES_NOISE * noise.max_abs_diff * float(np.sqrt(case.params[name].size))
        return Check(what, float(abs(ours - theirs)), bound, "max", ZERO)
    return Check(what, float(abs(ours - theirs) / max(abs(float(theirs)), 1e-30)), RELATIVE_L2, "l2")


def compare(
    what: str,
    ours: np.ndarray,
    theirs: np.ndarray,
    noise: RoundingNoise | None = None,
    valid: np.ndarray | None = None,
    note: str = "",
) -> Check:
    """Compare one array by the criterion above.

    valid: boolean, over the leading axes of the arrays; None: all entries count. A non-finite entry that counts is an
    infinite error. Stated noise between 1 % and 10 times the array's scale is not rounding (undefined entries, a
    quaternion's sign), so the second criterion is used. With more noise the exact value is zero and the array contains
    only rounding, which the first criterion bounds.
    """
    if ours.shape != theirs.shape:
        raise ValueError(f"{what}: WarpFold's shape is {list(ours.shape)}, the reference's {list(theirs.shape)}")
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    if valid is not None:
        counts = np.broadcast_to(valid.reshape(valid.shape + (1,) * (a.ndim - valid.ndim)), a.shape)
        a, b = a[counts], b[counts]
    if a.size == 0:
        return Check(what, 0.0, 0.0, "max", "no entry counts")
    difference = np.abs(a - b)
    if not np.isfinite(difference).all():
        return Check(what, math.inf, 0.0, "max", "not finite")
    if noise is not None and not UNDEFINED_ABOVE < noise.max_abs_diff / max(noise.max_abs, 1e-30) < ZERO_ABOVE:
        bound = TIMES_NOISE * noise.max_abs_diff + OF_SCALE * noise.max_abs
        return Check(what, float(difference.max()), bound, "max", note)
    size, error = float(np.linalg.norm(b)), float(np.linalg.norm(difference))
    return Check(what, error / size if size else error, RELATIVE_L2, "l2", note)


def same_sign(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return `ours` with the sign of each quaternion (first 4 of the last axis) from `theirs`: q and -q are equal."""
    dot = (ours[..., :4] * theirs[..., :4]).sum(-1, keepdims=True)
    turned = ours.copy()
    turned[..., :4] *= np.where(dot < 0, -1.0, 1.0)
    return turned


def along_rotations(gradient: np.ndarray, rigid: np.ndarray) -> np.ndarray:
    """Convert a gradient by frames [*, 3, 4] to [*, 6]: by rotations about the frame's axes, and by the translation."""
    product = np.swapaxes(rigid[..., :3], -1, -2) @ gradient[..., :3]
    turns = [product[..., j, i] - product[..., i, j] for i, j in ((1, 2), (2, 0), (0, 1))]
    return np.concatenate([np.stack(turns, -1), gradient[..., 3]], -1)


def _array(x: Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()
