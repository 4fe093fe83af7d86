"""Trials of candidates that end their process, in a separate module because other processes import them by name."""

import os

from warpfold.bench.kernels import Seconds, Trial
from warpfold.ops.triton.launch import KernelConfig, kernels


def kills(trial: Trial) -> tuple[Seconds, dict[KernelConfig, str]]:
    """End the process at the second candidate of the task, as an illegal access would."""
    # loads the kernels
    kernels()
    if trial.task.candidates[1] in trial.candidates:
        os._exit(1)
    return {candidate: [1.0] for candidate in trial.candidates[1:]}, {trial.candidates[0]: "not exact"}


def always_kills(trial: Trial) -> tuple[Seconds, dict[KernelConfig, str]]:
    os._exit(1)
