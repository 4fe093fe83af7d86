"""Train on several processes of this machine.  The calling process is rank 0 and starts the others."""

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

JOIN_SECONDS = 30.0  # for each process, after the run has ended


@dataclass(frozen=True)
class _Job:
    """Arguments of the training that can be pickled for a spawned process."""

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
            return train(self.config, sources, self.out, init=self.init, device=device, watch=watch, team=team)


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
    """Train as `train` does, on this process and `ranks` - 1 others, which end with this one.

    The plan of `config` must be for this number of ranks.  If `device` is "cuda", each rank has its own GPU.  In a
    script, call this under `if __name__ == "__main__"`, since the other processes import the script.
    """
    if ranks == 1:
        return train(config, sources, out, init=init, device=device, watch=watch)
    first = ProcessInfo(ranks=ranks, ranks_per_node=ranks, address="127.0.0.1", port=free_port())
    job = _Job(config, [(source.store, source.keys.rows, source.weight) for source in sources], out, init, device)
    context = multiprocessing.get_context("spawn")
    other_infos = [replace(first, rank=rank, local_rank=rank) for rank in range(1, ranks)]
    processes = [context.Process(target=job.run, args=(info,), daemon=True) for info in other_infos]
    for process in processes:
        process.start()
    try:
        return job.run(first, watch)
    finally:
        # If this rank fails, it tells the others, which then end too.  A process that hangs is terminated.
        for process in processes:
            process.join(JOIN_SECONDS)
            if process.is_alive():
                process.terminate()
