"""What the processes of `Ready` do: make examples and batches, with random numbers of their own; and costs."""

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from warpfold.data.load.blocks import view
from warpfold.data.load.workers import Made, Workers
from warpfold.engine.nested import Flattening, to_arrays, unflatten
from warpfold.engine.randomness import kept_random, seed_random
from warpfold.errors import UserError
from warpfold.keyed import keyed_hash

TREE = "tree"  # the name of the JSON among a batch's arrays
FAILED = "failed"  # of the JSON of an error: it is raised when it is the batch's turn
SHARE = 64  # examples whose costs are found together


class ReadyError(RuntimeError):
    """An example that could not be made: which, why, and the worker's traceback."""


class _About:
    """A context in which any error becomes a ReadyError that says what was made."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, Exception):
            said = str(error).partition("\n")[0]
            raise ReadyError(f"{self._what}: {type(error).__name__}{': ' * bool(said)}{said}") from error


class BatchMaker:
    """Make batches of a dataset; an object that processes get, with the dataset."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset, self.collate, self.seed = dataset, collate, seed

    def __call__(self, epoch: int, indices: list[int]) -> Mapping[str, np.ndarray]:
        """Return a batch as arrays by number, and the JSON that says what they are, as bytes."""
        torch.set_num_threads(1)
        flattening = Flattening("Ready: the batch", classes=True)
        try:
            tree = flattening.tree(self.batch(epoch, indices))
        except (ReadyError, UserError) as error:
            return _failure(error)
        arrays = {str(number): array for number, array in enumerate(to_arrays(flattening.leaves))}
        return {TREE: _json(tree), **arrays}

    def batch(self, epoch: int, indices: list[int]) -> Any:
        """Return what `collate` makes of examples."""
        many = getattr(self.dataset, "__getitems__", None)
        if many:
            self._seed(epoch, indices[0])
            with _About(f"examples {indices} of the dataset"):
                examples = many(indices)
        else:
            examples = [self.example(epoch, index) for index in indices]
        with _About(f"examples {indices} of the dataset, as a batch"):
            return self.collate(examples)

    def example(self, epoch: int, index: int) -> Any:
        """Return an example, drawn for an epoch."""
        self._seed(epoch, index)
        with _About(f"example {index} of the dataset"):
            return self.dataset[index]

    def _seed(self, epoch: int, index: int) -> None:
        seed_random(keyed_hash(self.seed, epoch, index))


class CostMaker:
    """Find the costs of examples; an object that processes get, with the dataset."""

    def __init__(self, dataset: Any, cost: Callable[[Any], float], seed: int) -> None:
        self._examples, self._cost = BatchMaker(dataset, list, seed), cost

    def __call__(self, indices: list[int]) -> Mapping[str, np.ndarray]:
        """Return the costs of these examples, as they are drawn for the first epoch."""
        try:
            return {"costs": self.costs(indices)}
        except ReadyError as error:
            return _failure(error)

    def costs(self, indices: list[int]) -> np.ndarray:
        """Return the costs themselves, or raise."""
        found = []
        for index in indices:
            example = self._examples.example(0, index)
            with _About(f"the cost of example {index} of the dataset"):
                found.append(float(self._cost(example)))
        return np.array(found)


def _json(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _failure(error: Exception) -> Mapping[str, np.ndarray]:
    trace = "" if isinstance(error, UserError) else "".join(traceback.format_exception(error))
    return {FAILED: _json([str(error), trace])}


def _read(made: Made) -> tuple[list[tuple[str, str, tuple[int, ...], int]], Tensor]:
    """Return where the arrays lie, and the bytes.  Errors: what the worker raised, with its traceback."""
    host = torch.as_tensor(made.buffer)
    (name, dtype, shape, offset), *_ = made.layout
    if name == FAILED:
        said, trace = json.loads(view(host, dtype, shape, offset).numpy().tobytes())
        raise ReadyError(f"{said}\n\nIn the worker:\n{trace}") if trace else UserError(said)
    return made.layout, host


def find_costs(make: CostMaker, indices: Sequence[int], workers: int) -> np.ndarray:
    """Return the costs of examples, found by so many processes (or here)."""
    if not workers:
        with kept_random():
            return make.costs(list(indices))
    jobs = [list(indices[begin : begin + SHARE]) for begin in range(0, len(indices), SHARE)]
    with start_workers(make, min(workers, len(jobs)), None) as those:
        for number, job in enumerate(jobs):
            those.submit(number, [job])
        with those.changed:
            while len(those.outcomes) < len(jobs):
                those.wait()
            outcomes = [those.outcomes[number] for number in range(len(jobs))]
    costs = []
    for outcome in outcomes:
        if not isinstance(outcome, Made):
            raise ReadyError(f"the costs of examples: {outcome.reason}")
        [(_, dtype, shape, offset)], host = _read(outcome)
        costs.append(view(host, dtype, shape, offset).numpy().copy())
    return np.concatenate(costs)


def read_batch(made: Made, on_device: Tensor | None) -> Any:
    """Return the batch that a worker made; its tensors are views of what lies on the device, if anything does."""
    ((_, dtype, shape, offset), *others), host = _read(made)
    whole = host if on_device is None else on_device
    tree = json.loads(view(host, dtype, shape, offset).numpy().tobytes())

    def tensor(number: int) -> Tensor:
        _, dtype, shape, offset = others[number]
        return view(whole, dtype, shape, offset)

    def array(number: int) -> np.ndarray:
        _, dtype, shape, offset = others[number]
        return np.ndarray(shape, dtype, host.numpy(), offset)

    return unflatten(tree, tensor, array, classes=True)


def start_workers(make: Any, count: int, buffer: Callable[[int], Any] | None) -> Workers:
    """Start processes.  Errors: UserError where what they need cannot be sent to them."""
    examples = make if isinstance(make, BatchMaker) else make._examples

    def refused(kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, AttributeError | TypeError) or type(error).__name__ == "PicklingError":
            raise UserError(
                f"Ready: the dataset or what makes batches of it cannot be sent to processes ({error}); define their "
                "classes and functions at the top of a module, or use workers=0"
            ) from error

    preload = [module for module in (type(examples.dataset).__module__,) if module != "__main__"]
    with ExitStack() as stack:
        stack.push(refused)
        return Workers(make, count, buffer, preload)
    raise AssertionError("not reached")
