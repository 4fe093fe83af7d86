"""Fine-tune behind a frozen trunk: whether its outputs are computed for each step, or stored in the run's folder."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial

from warpfold import settings
from warpfold.data.load.order import Source
from warpfold.engine.checkpoint import RunFolder
from warpfold.engine.trainable import trained_parts
from warpfold.engine.trunk import FrozenTrunk, TrunkStore, largest_store
from warpfold.errors import UserError
from warpfold.model.alphafold import AlphaFold
from warpfold.parallel.plan import DTYPES
from warpfold.parallel.team import Team
from warpfold.training.config import RunConfig, fixed_settings
from warpfold.training.examples import draw_recycles, fingerprint

log = logging.getLogger("warpfold.plan")


def make_frozen_trunk(model: AlphaFold, config: RunConfig) -> FrozenTrunk | None:
    """Make the frozen trunk if no part of it is trained and examples have few draws; None otherwise."""
    trained, finetune = trained_parts(config.model, config.finetune), config.finetune
    if trained.trunk or not finetune.draws:
        return None
    draw, recycles = partial(finetune.draw, examples=config.optim.accumulate), partial(draw_recycles, config)
    return FrozenTrunk(model, config.train.seed, draw, recycles, trained.has_masked_msa)


def open_trunk_store(
    run: RunFolder, config: RunConfig, sources: Sequence[Source], origin: Mapping[str, str], team: Team, device: str
) -> TrunkStore | None:
    """Open the store of trunk outputs and log its maximum size, or log why there is no store.  All ranks call this.

    Errors: UserError if `finetune.trunk = "cached"` is impossible, such as when the disk has too little room.
    """
    mode, plan = config.finetune.trunk, config.plan
    if mode == "computed":
        return None
    why_not = trained_parts(config.model, config.finetune).why_not_cached()
    if why_not is None and (plan.axial > 1 or plan.batch > 1):
        why_not = f"{'plan.axial' if plan.axial > 1 else 'plan.batch'} is above 1"
    store, size = TrunkStore(run.path / "trunk"), ""
    if why_not is None and team.is_rank_zero:
        examples, dtype = config.train.steps * config.optim.accumulate, DTYPES[plan.precision]
        sizes = config.finetune.draws, examples, config.model, config.data.crop, config.data.max_msa, dtype
        try:
            size = store.check_room(*largest_store(sources, *sizes))
            fixed = fixed_settings(settings.to_dict(config))
            padding = plan.sizes, plan.multiple_on(device)
            made_with = [fixed, plan.precision, *padding, sorted(origin.items())]
            store.begin(fingerprint(repr(made_with).encode()))
        except UserError as error:
            why_not = str(error)
    # Rank 0 alone looks at the disk, and all ranks must do the same.
    why_not, size = team.broadcast([why_not, size], "the store of the trunk")
    if why_not is None:
        if team.is_rank_zero:
            log.info("trunk: kept in %s, %s, in %s, as nothing of it is trained", store.folder, size, plan.precision)
        return store
    if mode == "cached":
        raise UserError(f'finetune.trunk = "cached" is impossible: {why_not}')
    if team.is_rank_zero:
        log.info("trunk: computed each time, as %s", why_not)
    return None
