"""Which of WarpFold's functions and layers answers which reference case.

Cases are known by the beginning of their file's name, longest first, so that another size or seed of a known case
(`outer_product_mean_truesize`) needs no entry here; everything else about it is read from its files.
"""

from collections.abc import Callable

from warpfold.golden.answer import Answer
from warpfold.golden.geometry import GEOMETRY
from warpfold.golden.losses import LOSSES
from warpfold.golden.models import whole_model
from warpfold.golden.read import BrokenCase, Case, NotImplementedCase
from warpfold.golden.structure import STRUCTURE
from warpfold.golden.trunk import TRUNK

Answerer = Callable[[Case], Answer]

_MULTIMER = (
    "geometry/atom37_to_frames_multimer",
    "losses/multimer_losses",
    "losses/structural_violation_multimer",
    "units/fold_iteration_multimer",
    "units/invariant_point_attention_multimer",
    "units/msa_processing_multimer",
    "units/relpos_multimer",
    "units/template_embedding_1d_multimer",
    "units/template_embedding_multimer",
)

_ANSWERS: dict[str, Answerer] = {
    **{f"geometry/{name}": answer for name, answer in GEOMETRY.items()},
    **{f"losses/{name}": answer for name, answer in LOSSES.items()},
    **{f"units/{name}": answer for name, answer in {**TRUNK, **STRUCTURE}.items()},
}


def answer_for(case: Case) -> Answer:
    """WarpFold's answer to a case.  Errors: NotImplementedCase (Multimer's own parts), BrokenCase (an unknown name)."""
    if case.kind == "models":
        return whole_model(case)
    key = f"{case.kind}/{case.title}"
    known = max((name for name in (*_MULTIMER, *_ANSWERS) if _begins(key, name)), key=len, default=None)
    if known in _MULTIMER or (known is None and "multimer" in key):
        raise NotImplementedCase(f"{case.title}: part of AlphaFold-Multimer")
    if known is None:
        raise BrokenCase(f"{key}: a case of an unknown name")
    return _ANSWERS[known](case)


def _begins(key: str, name: str) -> bool:
    """Whether `key` is `name`, or `name` and more words."""
    return key == name or key.startswith((f"{name}_", f"{name}.", f"{name}-"))
