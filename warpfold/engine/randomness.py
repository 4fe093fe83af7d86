"""The global random numbers of Python, NumPy and torch, which a user's model and dataset draw from."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# ruff: noqa: NPY002 (the global generator is the one that datasets and models of others use)


def seed_random(number: int) -> None:
    """Seed the generators of the host by a number of at least 64 bits."""
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number & (2**63 - 1))


def random_state() -> dict[str, Any]:
    """Return the state of all generators, that of the current GPU too: nested values, with arrays."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Go on with a state that `random_state` returned; that of a GPU where there is one."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def kept_random() -> Iterator[None]:
    """Leave the generators of the host as they were, whatever is drawn within."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
