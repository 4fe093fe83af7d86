"""What WarpFold says to a reference case, and the checks that follow from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from warpfold.golden.compare import RELATIVE_L2, TIMES_NOISE, ZERO_ABOVE, Check, compare, same_sign
from warpfold.golden.read import BrokenCase, Case
from warpfold.model.deepmind import arrays, from_deepmind

# A gradient below this part of the case's largest one is what fp32 leaves of zero (for example of an offset that adds
# the same to all logits of a softmax): without stated noise, all that can be asked is that ours is as small.
RESOLVED, ZERO = 1e-7, "the exact gradient is 0"
Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class Answer:
    """WarpFold's outputs for one case, and how to look at them.

    outputs:     by the reference's names; still attached to the graph.
    leaves:      the inputs by name, those that a gradient is asked for as leaves of the graph.
    gradients:   after backward, the gradient of every parameter by DeepMind's names; None: no parameters.
    objective:   what was differentiated; None: sum of output * cotangent.
    valid:       boolean masks over leading axes, by `out/*` or `grad_in/*`; absent: every entry counts.
    quaternions: names (as in `valid`) of arrays that begin with a quaternion, equal up to sign.
    notes:       by name, a remark for the table.
    left_out:    outputs of the reference that are not compared, with the reason.
    """

    outputs: Mapping[str, Tensor]
    leaves: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: Callable[[], Mapping[str, np.ndarray]] | None = None
    objective: Tensor | None = None
    valid: Mapping[str, Tensor] = field(default_factory=dict)
    quaternions: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


def tensors(case: Case) -> dict[str, Tensor]:
    """The inputs of a unit as tensors: integers as int64, floats as fp32, leaves where `grad_in` asks for them."""
    wanted = set(case.asks("grad_in"))
    inputs = {}
    for name, array in case.inputs.items():
        x = torch.from_numpy(np.array(array))
        x = x.float() if x.is_floating_point() else x.long()
        inputs[name] = x.requires_grad_() if name in wanted else x
    return inputs


def load(module: Module, case: Case, scope: str | None = None) -> Module:
    """`module` with the case's parameters, strictly, ready to be compared (no dropout).

    `scope` is what DeepMind's names begin with; None: the one scope that all of them are in.
    """
    from_deepmind(module, case.params, _scope(case) if scope is None else scope, source=case.name)
    return module.eval()


def parameter_gradients(module: nn.Module, case: Case, scope: str | None = None) -> Callable[[], dict[str, np.ndarray]]:
    """For `Answer.gradients`: what backward left in the parameters, as DeepMind's arrays; zeros where nothing came."""
    top = _scope(case) if scope is None else scope

    def collect() -> dict[str, np.ndarray]:
        """The gradients, once they are there."""
        parameters = dict(module.named_parameters())
        out: dict[str, np.ndarray] = {}
        for a in arrays(module, top):
            parameter = parameters[a.ours]
            grad = a.to_theirs(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            if a.block is None:
                out[a.theirs] = grad
            else:
                out.setdefault(a.theirs, np.zeros(a.stacked_shape, grad.dtype))[a.block] = grad
        return out

    return collect


def _scope(case: Case) -> str:
    scopes = sorted({name.partition("//")[0].partition("/")[0] for name in case.params})
    if len(scopes) != 1:
        raise BrokenCase(f"{case.name}: parameters in {len(scopes)} scopes {scopes[:3]}, one expected")
    return scopes[0]


def checks(case: Case, answer: Answer) -> list[Check]:
    """Every expected array against the answer.  Errors: BrokenCase; ValueError where there is no answer to one."""
    ours: dict[str, np.ndarray] = {f"out/{name}": _array(x) for name, x in answer.outputs.items()}
    names = [name for name in case.expected if name.startswith("grad_")]
    if names:
        ours |= _gradients(case, answer)
    found = []
    largest = max((float(np.abs(case.expected[name]).max(initial=0)) for name in names), default=0.0)
    for what, theirs in case.expected.items():
        if what.startswith("out/") and what[4:] in answer.left_out:
            continue
        if what not in ours:
            raise ValueError(f"{what}: the reference has it, WarpFold gives none")
        x = ours[what]
        if what in answer.quaternions and x.shape == theirs.shape:
            x = same_sign(x, theirs)
        if what.startswith("grad_params_l2/"):
            found.append(_norm_check(case, what, x, theirs))
        else:
            valid = answer.valid.get(what)
            mask = None if valid is None else _array(valid).astype(bool)
            noise = case.noise.get(what)
            if noise is None and what.startswith("grad_") and np.abs(theirs).max(initial=0) <= RESOLVED * largest:
                found.append(Check(what, float(np.abs(x - theirs).max(initial=0)), RESOLVED * largest, "max", ZERO))
            else:
                found.append(compare(what, x, theirs, noise, mask, answer.notes.get(what, "")))
    return found


def _gradients(case: Case, answer: Answer) -> dict[str, np.ndarray]:
    """Runs backward; gradients by the names of `Case.expected`."""
    _objective(case, answer).backward()
    ours: dict[str, np.ndarray] = {}
    for name in case.asks("grad_in"):
        leaf = answer.leaves[name]
        ours[f"grad_in/{name}"] = _array(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
    for name, array in (answer.gradients() if answer.gradients else {}).items():
        ours[f"grad_params/{name}"] = array
        ours[f"grad_params_l2/{name}"] = np.asarray(np.linalg.norm(array.astype(np.float64)))
        if name in case.samples:
            ours[f"grad_params_sample/{name}"] = array.ravel()[case.samples[name]]
    return ours


def _objective(case: Case, answer: Answer) -> Tensor:
    """What the reference differentiated: the output that `grad_of` names, or the sum of output * cotangent."""
    if answer.objective is not None:
        return answer.objective
    named = answer.outputs.get(case.meta.get("grad_of") or "")
    if named is not None:
        return named
    if not case.cotangents:
        raise BrokenCase(f"{case.name}: has gradients but neither cotangents nor an output that 'grad_of' names")
    terms = [(answer.outputs[name] * torch.from_numpy(cotangent)).sum() for name, cotangent in case.cotangents.items()]
    return torch.stack(terms).sum()


def _norm_check(case: Case, what: str, ours: np.ndarray, theirs: np.ndarray) -> Check:
    """The norm of a parameter's gradient, of which only a sample is stored: within 1e-4.

    Where the sample's noise says that the exact gradient is zero, the norm is that of rounding, at most
    10 * noise for each entry.
    """
    name = what.split("/", 1)[1]
    noise = case.noise.get(f"grad_params_sample/{name}")
    if noise is not None and noise.max_abs_diff > ZERO_ABOVE * noise.max_abs:
        bound = TIMES_NOISE * noise.max_abs_diff * float(np.sqrt(case.params[name].size))
        return Check(what, float(abs(ours - theirs)), bound, "max", ZERO)
    return Check(what, float(abs(ours - theirs) / max(abs(float(theirs)), 1e-30)), RELATIVE_L2, "l2")


def _array(x: Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()
