"""WarpFold's outputs for one reference case, compared array by array with the official code's.

The rule by which two arrays agree:

* The official fp32 run's own distance from fp64 is stated: max |ours - theirs| <= 10 * that + 1e-6 * scale.
* It is not stated: |ours - theirs|_2 / |theirs|_2 <= 1e-4.

Only valid entries count (masks of the case); the error of masked entries is reported, never judged.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from warpfold.golden.read import BrokenCase, ReferenceCase, RoundingNoise
from warpfold.model.deepmind import arrays, from_deepmind

TIMES_NOISE = 10.0
OF_SCALE = 1e-6
RELATIVE_L2 = 1e-4
UNDEFINED_ABOVE, ZERO_ABOVE = 1e-2, 10.0
# A gradient smaller than this fraction of the case's largest one is fp32 rounding of an exact zero (for example that of
# an offset added to all logits of a softmax): without stated noise, ours only has to be as small.
RESOLVED, ZERO = 1e-7, "the exact gradient is 0"

Module = TypeVar("Module", bound=nn.Module)
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class CaseOutputs:
    """What WarpFold computes for one case, and how to compare it.

    outputs:     by the reference's names; still attached to the graph.
    module:      the module whose parameters' gradients are compared; None: there are no parameters.
    scope:       what DeepMind's names of its parameters begin with, as in `load`.
    inputs:      what the outputs were computed from, by name; those that a gradient is asked for are leaves.
    objective:   the scalar to differentiate; None: sum of output * cotangent.
    valid:       boolean masks over leading axes, by `out/*` or `grad_in/*`; absent: every entry counts.
    quaternions: names (as in `valid`) of arrays that begin with a quaternion, equal up to sign.
    rotations:   names of inputs [*, 3, 4], rotation and translation.  Only changes that leave a rotation one have a
                 meaning, so of a gradient by such an input only their part is compared.
    notes:       by name, a remark for the table.
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


Compute = Callable[[ReferenceCase, Tensors], CaseOutputs]  # from a case and its inputs as tensors


@dataclass(frozen=True)
class Check:
    """One array compared.  `error` and `bound` are both absolute (measure "max") or both relative ("l2")."""

    what: str
    error: float
    bound: float
    measure: str
    note: str = ""
    masked_error: float | None = None  # max |ours - theirs| on the entries that do not count; None: there are none

    @property
    def ok(self) -> bool:
        return self.error <= self.bound

    @property
    def ratio(self) -> float:
        """Return error over bound, for sorting: 0 where both are 0, infinite where only the bound is."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound > 0 and math.isfinite(self.error) else math.inf


def tensors(case: ReferenceCase) -> Tensors:
    """Return a unit's inputs as tensors: integers as int64, floats as fp32, leaves where `grad_in` asks for them."""
    wanted = set(case.asks("grad_in"))
    inputs = {}
    for name, array in case.inputs.items():
        x = torch.from_numpy(np.array(array))
        x = x.float() if x.is_floating_point() else x.long()
        inputs[name] = x.requires_grad_() if name in wanted else x
    return inputs


def load(module: Module, case: ReferenceCase, scope: str | None = None) -> Module:
    """Return `module` with the case's parameters, strictly, ready to be compared (no dropout).

    scope: what DeepMind's names begin with; None: the one scope that all of them are in.
    """
    from_deepmind(module, case.params, _scope(case) if scope is None else scope, source=case.name)
    return module.eval()


def _parameter_gradients(module: nn.Module, scope: str) -> dict[str, np.ndarray]:
    """Return the gradient of every parameter as DeepMind's arrays, zeros where backward left none."""
    parameters = dict(module.named_parameters())
    found: dict[str, np.ndarray] = {}
    for a in arrays(module, scope):
        parameter = parameters[a.ours]
        grad = a.to_theirs(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        if a.block is None:
            found[a.theirs] = grad
        else:  # DeepMind stacks the blocks of a stack in one array
            found.setdefault(a.theirs, np.zeros(a.stacked_shape, grad.dtype))[a.block] = grad
    return found


def _scope(case: ReferenceCase) -> str:
    scopes = sorted({name.partition("//")[0].partition("/")[0] for name in case.params})
    if len(scopes) != 1:
        raise BrokenCase(f"{case.name}: parameters in {len(scopes)} scopes {scopes[:3]}, one expected")
    return scopes[0]


def checks(case: ReferenceCase, result: CaseOutputs) -> list[Check]:
    """Compare every expected array.  Errors: BrokenCase; ValueError where WarpFold gives no such array."""
    ours: dict[str, np.ndarray] = {f"out/{name}": _array(x) for name, x in result.outputs.items()}
    names = [name for name in case.expected if name.startswith("grad_")]
    if names:
        ours |= _gradients(case, result)
    found = []
    largest = max((float(np.abs(case.expected[name]).max(initial=0)) for name in names), default=0.0)
    for what, theirs in case.expected.items():
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
    """Run backward and return the gradients by the names of `ReferenceCase.expected`."""
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
    """Check the norm of a parameter's gradient where only a sample of the gradient is stored: within 1e-4.

    Where the sample's noise says that the exact gradient is zero, the norm is that of rounding, at most
    10 * noise for each entry.
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
    """Judge one array by the rule above.

    `valid` is boolean and covers the leading axes of the arrays (None: every entry counts).  Anything that is not
    finite where it counts is an infinite error.  Stated noise between 1 % and 10 times of the array's scale is no
    rounding (undefined entries, a quaternion's sign), so the second rule is used; above that the exact value is zero
    and the array holds rounding alone, which the first rule bounds.
    """
    if ours.shape != theirs.shape:
        raise ValueError(f"{what}: WarpFold's shape is {list(ours.shape)}, the reference's {list(theirs.shape)}")
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    masked_error = None
    if valid is not None:
        counts = np.broadcast_to(valid.reshape(valid.shape + (1,) * (a.ndim - valid.ndim)), a.shape)
        if not counts.all():
            masked_error = float(np.abs(a[~counts] - b[~counts]).max())
        a, b = a[counts], b[counts]
    if a.size == 0:
        return Check(what, 0.0, 0.0, "max", "no entry counts", masked_error)
    difference = np.abs(a - b)
    if not np.isfinite(difference).all():
        return Check(what, math.inf, 0.0, "max", "not finite", masked_error)
    if noise is not None and not UNDEFINED_ABOVE < noise.max_abs_diff / max(noise.max_abs, 1e-30) < ZERO_ABOVE:
        bound = TIMES_NOISE * noise.max_abs_diff + OF_SCALE * noise.max_abs
        return Check(what, float(difference.max()), bound, "max", note, masked_error)
    size, error = float(np.linalg.norm(b)), float(np.linalg.norm(difference))
    return Check(what, error / size if size else error, RELATIVE_L2, "l2", note, masked_error)


def same_sign(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return `ours` with each quaternion (first 4 of the last axis) in the sign of `theirs`: q and -q are the same."""
    dot = (ours[..., :4] * theirs[..., :4]).sum(-1, keepdims=True)
    turned = ours.copy()
    turned[..., :4] *= np.where(dot < 0, -1.0, 1.0)
    return turned


def along_rotations(gradient: np.ndarray, rigid: np.ndarray) -> np.ndarray:
    """Return a gradient by frames [*, 3, 4] as [*, 6]: by turns about the frame's own axes, by the translation."""
    product = np.swapaxes(rigid[..., :3], -1, -2) @ gradient[..., :3]
    turns = [product[..., j, i] - product[..., i, j] for i, j in ((1, 2), (2, 0), (0, 1))]
    return np.concatenate([np.stack(turns, -1), gradient[..., 3]], -1)


def _array(x: Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()
