"""Examples that a run leaves out because their loss or gradient is not finite: a few are bad luck, many are divergence.

They add nothing to a step, and its mean is over the others (engine/optim.py); a step without others changes nothing.
"""

from collections.abc import Sequence

from warpfold.engine.log import Seen
from warpfold.errors import UserError

WINDOW = 1_000  # examples in a row


class Skipped:
    """Which of the last WINDOW examples were skipped; the same on all ranks, and part of a checkpoint's notes."""

    def __init__(self, most: int, places: Sequence[int] = ()) -> None:
        """most: train.max_skipped.  places: those of `Skipped.places` in the checkpoint that the run continues from."""
        self.most = most
        self.places = list(places)  # how many examples the run had used before each

    def add(self, step: int, seen: Sequence[Seen]) -> None:
        """Count the examples of a step, those of all ranks, in an order that is the same on all; step: done, with it.

        Errors: UserError when more than `most` of any WINDOW in a row were skipped.
        """
        end = step * len(seen)
        for place, example in enumerate(seen, end - len(seen)):
            if example.finite:
                continue
            self.places = [*(p for p in self.places if p > place - WINDOW), place]
            if len(self.places) > self.most:
                raise UserError(
                    f"step {step}: the loss or gradient of {len(self.places)} of the last {min(place + 1, WINDOW)} "
                    f"examples is not finite, and train.max_skipped = {self.most}: the run diverges; its failures "
                    "folder has what reproduces the first of them, and the checkpoints from before them are kept"
                )
        self.places = [p for p in self.places if p >= end - WINDOW]
