"""Make examples, batches and costs in the worker processes of `Ready`, with keyed random numbers."""

import json
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from warpfold.data.load.blocks import view
from warpfold.data.load.workers import Made, Workers
from warpfold.engine.nested import Flattening, to_arrays, unflatten
from warpfold.errors import UserError
from warpfold.keyed import keyed_hash

TREE = "tree"  # name of a batch's JSON
# Name of the JSON of an error, which is raised when the batch is used.
FAILED = "failed"
COST_BATCH = 64  # examples per job

# ruff: noqa: NPY002 (the global generator is the one that datasets of others use)


class ReadyError(RuntimeError):
    """An example could not be made.  The message has its index, the reason, and the worker's traceback."""


class _NamingErrors:
    """A context that converts any error but a refusal to a ReadyError that names the example."""

    def __init__(self, what: str, refusals: tuple[type[Exception], ...] = ()) -> None:
        self._what = what
        self._refusals: tuple[type[Exception], ...] = (ReadyError, *refusals)

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, self._refusals):
            message = str(error).partition("\n")[0]
            raise ReadyError(f"{self._what}: {type(error).__name__}{': ' * bool(message)}{message}") from error


class BatchMaker:
    """Make batches of a dataset.  Each worker process gets a copy of this object.

    refusals: exceptions of the dataset for examples that cannot be used (`BatchOrder`).
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        seed: int,
        refusals: tuple[type[Exception], ...] = (),
    ) -> None:
        self.dataset, self.collate, self.seed, self.refusals = dataset, collate, seed, refusals

    def __call__(self, epoch: int, indices: list[Any]) -> Mapping[str, np.ndarray]:
        """Make a batch as arrays by number, and its structure as bytes of JSON.

        Errors: those of `refusals`.  Any other error becomes the batch, and is raised when the batch is used.
        """
        # The worker processes run side by side on the cores.
        torch.set_num_threads(1)
        flattening = Flattening("Ready: the batch", classes=True)
        try:
            tree = flattening.tree(self.batch(epoch, indices))
        except self.refusals:
            raise
        except (ReadyError, UserError) as error:
            trace = "" if isinstance(error, UserError) else "".join(traceback.format_exception(error))
            return {FAILED: _json([str(error), trace])}
        arrays = {str(number): array for number, array in enumerate(to_arrays(flattening.leaves))}
        return {TREE: _json(tree), **arrays}

    def batch(self, epoch: int, indices: list[Any]) -> Any:
        """Make and collate examples."""
        many = getattr(self.dataset, "__getitems__", None)
        if many:
            self._seed(epoch, indices[0])
            with _NamingErrors(f"examples {indices} of the dataset", self.refusals):
                examples = many(indices)
        else:
            examples = []
            for index in indices:
                self._seed(epoch, index)
                with _NamingErrors(f"example {index} of the dataset", self.refusals):
                    examples.append(self.dataset[index])
        with _NamingErrors(f"examples {indices} of the dataset, as a batch"):
            return self.collate(examples)

    def _seed(self, epoch: int, index: Any) -> None:
        """Seed the generators of the host.  index: a number, or a list of numbers and texts."""
        number = keyed_hash(self.seed, epoch, *(index if isinstance(index, list) else [index]))
        random.seed(number)
        np.random.seed(number & 0xFFFFFFFF)
        torch.default_generator.manual_seed(number & (2**63 - 1))


class Costs:
    """A dataset of the costs of another dataset's examples, as they are drawn for the first epoch."""

    def __init__(self, dataset: Any, cost: Callable[[Any], float]) -> None:
        self.dataset, self.cost = dataset, cost

    def __getitem__(self, index: int) -> float:
        example = self.dataset[index]
        with _NamingErrors(f"the cost of example {index} of the dataset"):
            return float(self.cost(example))


def _json(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def find_costs(make: BatchMaker, indices: Sequence[int], workers: int) -> np.ndarray:
    """Compute the costs of examples, [n] float64, with `workers` processes, or in this process with 0.

    make: makes batches of a `Costs` dataset.
    """
    jobs = [list(indices[begin : begin + COST_BATCH]) for begin in range(0, len(indices), COST_BATCH)]
    if not workers:
        with kept_random():
            return np.concatenate([np.empty(0), *(make.batch(0, job) for job in jobs)])
    with start_workers(make, max(min(workers, len(jobs)), 1), None) as processes:
        for number, job in enumerate(jobs):
            processes.submit(number, (0, job))
        with processes.changed:
            while len(processes.outcomes) < len(jobs):
                processes.wait()
            outcomes = [processes.outcomes[number] for number in range(len(jobs))]
    # A rank has no jobs if there are more ranks than examples.
    costs = [np.empty(0)]
    for outcome in outcomes:
        if not isinstance(outcome, Made):
            raise ReadyError(f"the costs of examples: {outcome.reason}")
        costs.append(read_batch(outcome, None).copy())
    return np.concatenate(costs)


def read_batch(made: Made, on_device: Tensor | None) -> Any:
    """Rebuild the batch of a worker.

    on_device: the copy of the batch's buffer on the device, of which the tensors are views.  None: of the buffer.
    Errors: those of the worker, with its traceback.
    """
    host = torch.as_tensor(made.buffer)
    (name, dtype, shape, offset), *leaves = made.layout
    tree = json.loads(view(host, dtype, shape, offset).numpy().tobytes())
    if name == FAILED:
        message, trace = tree
        raise ReadyError(f"{message}\n\nIn the worker:\n{trace}") if trace else UserError(message)
    buffer = host if on_device is None else on_device

    def tensor(number: int) -> Tensor:
        _, dtype, shape, offset = leaves[number]
        return view(buffer, dtype, shape, offset)

    def array(number: int) -> np.ndarray:
        _, dtype, shape, offset = leaves[number]
        return np.ndarray(shape, dtype, host.numpy(), offset)

    return unflatten(tree, tensor, array, classes=True)


def start_workers(make: BatchMaker, count: int, buffer: Callable[[int], Any] | None) -> Workers:
    """Start worker processes.  Errors: UserError if the dataset cannot be sent to them."""

    def explain(kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # The error of pickle is recognised by its name, because nothing here may import pickle.
        if isinstance(error, AttributeError | TypeError) or type(error).__name__ == "PicklingError":
            raise UserError(
                f"Ready: the dataset or its collate function cannot be sent to processes ({error}). Define their "
                "classes and functions at the top of a module, or use workers=0."
            ) from error

    dataset = make.dataset.dataset if isinstance(make.dataset, Costs) else make.dataset
    # Import the modules of the dataset, and of the `make` that WarpFold's dataset wraps, once before forking.
    makers = (dataset, getattr(dataset, "make", dataset))
    preload = [module for module in dict.fromkeys(type(maker).__module__ for maker in makers) if module != "__main__"]
    with ExitStack() as stack:
        stack.push(explain)
        return Workers(make, count, buffer, preload)
    raise AssertionError("not reached")


@contextmanager
def kept_random() -> Iterator[None]:
    """Restore the states of the host's generators at the end of the context."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
