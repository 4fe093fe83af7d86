"""OneStep: a recorded step does what the plain calls do.  The recorder is a stand-in: there is no GPU here."""

import pytest
import torch
from torch import Tensor, nn, optim

from tests.recorder import OperationRecorder
from warpfold import device
from warpfold.engine.flat import Flat
from warpfold.engine.one_step import OneStep
from warpfold.errors import UserError


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.wide = nn.Linear(7, 130), nn.Linear(130, 130)
        self.last, self.unused = nn.Linear(130, 1), nn.Linear(3, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.first(batch["x"]).tanh()
        if len(x) > 2:  # a smaller batch takes another way
            x = self.wide(x).tanh()
        return (self.last(x)[:, 0] - batch["y"]).square().mean()


def batches() -> list[dict[str, Tensor]]:
    torch.manual_seed(2)
    return [{"x": torch.randn(size, 7), "y": torch.randn(size)} for size in (4, 2, 4, 2, 4, 2, 4, 4)]


def plain(dtype: torch.dtype | None = None) -> tuple[Branches, list[float]]:
    model = Branches()
    optimizer = optim.Adam(model.parameters(), lr=0.01, fused=True)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_it_is_the_plain_loop(recorded: bool, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if recorded:
        monkeypatch.setattr(device, "find_recorder", lambda _: OperationRecorder())
    model = Branches()
    step = OneStep(model, Flat(model, optim.Adam, lr=0.01), dtype=dtype)
    losses = [step(batch).item() for batch in batches()]
    expected, their_losses = plain(dtype)
    assert losses == pytest.approx(their_losses, rel=1e-4)
    for p, q in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert model.unused.weight.grad is None
    assert (step.graphs.recorded, step.graphs.replayed) == ((2, 6) if recorded else (0, 0))
    if not recorded:
        assert list(step.graphs.refused) == ["graph of the passes: a cpu has no graphs"]


def test_what_a_graph_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "find_recorder", lambda _: OperationRecorder())
    model = nn.Linear(7, 1)

    def loss(batch: Tensor) -> Tensor:
        found = model(batch).square().mean()
        if found.item() < 0:
            raise ZeroDivisionError
        return found

    step = OneStep(model, Flat(model, optim.SGD), loss)
    step(torch.ones(2, 7))
    with pytest.raises(UserError, match=r"OneStep: the passes cannot be recorded \(.+\); pass graph=False"):
        step(torch.ones(2, 7))
    with pytest.raises(UserError, match=r"OneStep: dtype = torch.float16; choose torch.bfloat16"):
        OneStep(model, Flat(model, optim.SGD), dtype=torch.float16)
