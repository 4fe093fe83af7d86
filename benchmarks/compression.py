"""Compare our communication hook for DistributedDataParallel with those of torch.

    sudo python -m benchmarks.compression --out benchmarks/results/compression-NAME.json  (ten minutes on two cores)

The models are plain torch with generated data: a vision model (convolutions, BatchNorm) and a language model (embedding
tied to the output). They run on two ranks and, where namespaces are permitted (link.py), on two and four ranks of two
emulated nodes. Every contender trains on the same batches, alternately. A round takes as long as its slowest rank. The
script also reports the loss of the vision model after 150 steps on generated pictures, over loopback.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.link import Shape, over_the_link, refusal, run_ranks
from warpfold.engine.comm_hook import CompressionState, compression_hook


class Vision(nn.Module):
    """Residual convolutions, 2.0 million numbers, mostly in the later stages."""

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 64, 128, 256)
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.stages = nn.ModuleList()
        for before, width in zip((widths[0], *widths), widths):
            self.stages.append(
                nn.Sequential(
                    nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                    nn.Conv2d(width, width, 3, padding=1, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                    nn.Conv2d(width, width, 3, padding=1, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                )
            )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the loss of pictures and labels."""
        x = self.stem(batch[0])
        for stage in self.stages:
            x = stage(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), batch[1])

    @staticmethod
    def batch() -> tuple[Tensor, Tensor]:
        """Draw eight pictures."""
        return torch.randn(8, 3, 32, 32), torch.randint(10, (8,))


class Language(nn.Module):
    """Four layers of a transformer, 4.2 million numbers, a quarter in the embedding that is also the output."""

    def __init__(self, words: int = 4096, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        """Compute the loss of predicting each word from the words before it."""
        causal = nn.Transformer.generate_square_subsequent_mask(words.shape[1] - 1)
        x = self.embed(words[:, :-1])
        for layer in self.layers:
            x = layer(x, src_mask=causal, is_causal=True)
        return F.cross_entropy(self.out(x).flatten(0, 1), words[:, 1:].flatten())

    @staticmethod
    def batch() -> Tensor:
        """Draw two texts of 64 words."""
        return torch.randint(4096, (2, 64))


SHAPES = [Shape(1, 0.1), Shape(0.1, 1)]
MODELS = {"vision": Vision, "language": Language}
OURS: dict[str, dict[str, Any]] = {
    "ours, int8": {"method": "int8"},
    "ours, 1bit": {"method": "1bit"},
}
HIERARCHICAL: dict[str, dict[str, Any]] = {
    "ours, hierarchical, int8": {"hierarchical": True, "ranks_per_node": 2, "method": "int8"},
    "ours, hierarchical, 1bit": {"hierarchical": True, "ranks_per_node": 2, "method": "1bit"},
}
RANKS = (1, 4)  # of torch's PowerSGD


@dataclass(frozen=True)
class Place:
    """The number of ranks, and the link between two emulated nodes, or None for one machine."""

    ranks: int
    shape: Shape | None = None

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {'loopback' if self.shape is None else f'2 nodes, {self.shape}'}"


def torch_bf16(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Call torch's bf16 hook. DDP rejects the hook by its name on backends other than NCCL."""
    return default_hooks.bf16_compress_hook(group, bucket)


def contenders(
    kind: type[nn.Module], ranks: int, rate: float = 1e-4, start: int = 2
) -> dict[str, Callable[[Any], Tensor]]:
    """Create a training step for every contender. The steps return the loss and start from the same weights."""
    steps: dict[str, Callable[[Any], Tensor]] = {}

    def add(name: str, bucket_cap_mb: float | None = None) -> DistributedDataParallel:
        torch.manual_seed(0)
        model = DistributedDataParallel(kind(), bucket_cap_mb=bucket_cap_mb)
        steps[name] = stepped(model, torch.optim.Adam(model.parameters(), lr=rate, fused=True))
        return model

    add("DDP")
    add("torch, bf16").register_comm_hook(None, torch_bf16)
    for rank in RANKS:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
        # One bucket: with several its collectives come in another order on each rank, and gloo aborts.
        add(f"torch, powerSGD of rank {rank}", 1000.0).register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for name, options in {**OURS, **(HIERARCHICAL if ranks > 2 else {})}.items():
        model = add(name)
        model.register_comm_hook(CompressionState(model, start=start, **options), compression_hook)
    return steps


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any], Tensor]:
    def step(batch: Any) -> Tensor:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def learned(steps: dict[str, Callable[[Any], Tensor]], count: int = 150) -> dict[str, float]:
    """Train every contender to classify noisy pictures of ten patterns, and return the mean of its last losses."""
    torch.manual_seed(0)
    patterns = torch.randn(10, 3, 32, 32)
    found = {}
    for name, step in steps.items():
        losses = []
        for turn in range(count):
            torch.manual_seed(100 * turn + dist.get_rank() + 1)
            kind = torch.randint(10, (16,))
            losses.append(step((0.2 * patterns[kind] + torch.randn(16, 3, 32, 32), kind)))
        last = torch.stack(losses[-20:]).mean()
        dist.all_reduce(last)
        found[name] = round(float(last) / dist.get_world_size(), 4)
    return found


def timed(steps: dict[str, Callable[[Any], Tensor]], draw: Callable[[], Any], rounds: int) -> dict[str, dict[str, Any]]:
    """Time the steps alternately, in a random order each round, after two rounds of warm-up."""
    spent: dict[str, list[float]] = {name: [] for name in steps}
    sent = dict.fromkeys(steps, 0)
    names = list(steps)
    for turn in range(-2, rounds):
        torch.manual_seed(100 * turn + dist.get_rank())
        batch = draw()
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            before, begin = over_the_link(), time.perf_counter()
            steps[name](batch)
            took = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn >= 0:
                spent[name].append(float(took))
                sent[name] += over_the_link() - before
    first = names[0]
    return {
        name: {
            "seconds": round(statistics.median(times), 5),
            "speed": round(statistics.median(a / b for a, b in zip(spent[first], times)), 3),
            "mb_over_the_link": round(sent[name] / rounds / 1e6, 2),
        }
        for name, times in spent.items()
    }


def measurements(ranks: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the times of all contenders, for both models."""
    yield {name: timed(contenders(kind, ranks), kind.batch, rounds) for name, kind in MODELS.items()}


def losses(ranks: int) -> Iterator[dict[str, float]]:
    """Yield the last losses of all contenders on the vision model; the first 20 steps send whole gradients."""
    yield learned(contenders(Vision, ranks, rate=1e-3, start=20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--no-losses", action="store_true")
    arguments = parser.parse_args()
    why = refusal()
    places = [Place(2)]
    if why is None:
        places += [Place(ranks, shape) for ranks in (2, 4) for shape in SHAPES]
    else:
        print(f"no emulated nodes: {why}; loopback alone is measured")
    report: dict[str, Any] = {
        "what": "a training step (forward, backward, fused Adam) of a rank with one thread; speed: median over rounds "
        "of the seconds of DDP without a hook over the contender's, in the same round; losses: the mean of the last 20 "
        "of 150 steps of the vision model on two ranks",
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "rounds": arguments.rounds,
        "no_nodes_because": why,
        "results": {},
    }
    if not arguments.no_losses:
        (report["losses"],) = run_ranks(losses, 2, None, 2)
        print(report["losses"], flush=True)
    for place in places:
        (found,) = run_ranks(measurements, place.ranks, place.shape, place.ranks, arguments.rounds)
        report["results"][str(place)] = found
        for model, rows in found.items():
            for name, figures in rows.items():
                said = "  ".join(f"{key} {value}" for key, value in figures.items())
                print(f"{place!s:34} {model:9} {name:30} {said}", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
