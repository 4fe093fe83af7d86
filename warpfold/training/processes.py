"""Train on several processes of this machine, of which this one is the first and starts the others."""

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from warpfold.data.load.order import Source
from warpfold.data.store.store import Store
from warpfold.device import device_of
from warpfold.engine.watch import Watching
from warpfold.parallel.process import ProcessInfo
from warpfold.parallel.team import distributed_context, free_port
from warpfold.training.config import RunConfig
from warpfold.training.train import Summary, train

END = 30.0  # seconds that the others get to end, when the run has ended


@dataclass(frozen=True)
class _Job:
    """What each process needs to know, in a form that another one can be sent."""

    config: RunConfig
    sources: Sequence[tuple[Store, np.ndarray, float]]  # the rows of the keys
    out: Path
    init: Path | None
    device: str

    def run(self, process: ProcessInfo, watch: Watching | None = None) -> Summary:
        """Train as one of the processes."""
        device = device_of(self.device, process.local_rank)
        sources = [Source(store, store.keys.take(rows), weight) for store, rows, weight in self.sources]
        with distributed_context(process, self.config.plan, device) as team:
            return train(
                self.config,
                sources,
                self.out,
                init=self.init,
                device=device,
                watch=watch,
                team=team,
            )


def train_here(
    ranks: int,
    config: RunConfig,
    sources: Sequence[Source],
    out: Path,
    *,
    init: Path | None = None,
    device: str = "cpu",
    watch: Watching | None = None,
) -> Summary:
    """Train as `train` does, on this process and `ranks` - 1 others, which end when it does, however that is.

    The plan of `config` is for that many; each has a GPU of its own where `device` is "cuda".  In a script, call this
    under `if __name__ == "__main__"`: the others import it.
    """
    if ranks == 1:
        return train(config, sources, out, init=init, device=device, watch=watch)
    first = ProcessInfo(ranks=ranks, ranks_per_node=ranks, address="127.0.0.1", port=free_port())
    job = _Job(config, [(one.store, one.keys.rows, one.weight) for one in sources], out, init, device)
    context = multiprocessing.get_context("spawn")
    others = [replace(first, rank=rank, local_rank=rank) for rank in range(1, ranks)]
    started = [context.Process(target=job.run, args=(one,), daemon=True) for one in others]
    for one in started:
        one.start()
    try:
        return job.run(first, watch)
    finally:
        for one in started:
            one.join(END)
            if one.is_alive():
                one.terminate()
