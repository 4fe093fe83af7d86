"""Attention on a GPU: the Triton kernels against the definition, at the model's sizes and beyond 2^31 elements."""

import pytest
import torch

from tests.ops.triton.attention_cases import Case, Inputs, answers, inputs, mistakes
from tests.ops.triton.layouts import poisoned
from warpfold.ops import dispatch
from warpfold.ops.attention import attention, global_attention

pytestmark = pytest.mark.gpu
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ODD = [
    Case(mask="clear"),
    Case(lead=(3,), queries=130, keys=130, width=32),
    Case(lead=(2, 5), queries=67, keys=67, layout="column", bias="none", mask="tail"),
    Case(lead=(70,), queries=70, keys=70, heads=4, layout="column"),
    Case(lead=(2, 3), queries=19, keys=133, width=64, layout="own", bias="batched", mask="tail"),
    Case(lead=(3,), queries=5, keys=1, width=8, layout="own", mask="clear"),
    Case(lead=(9,), queries=8, keys=700, heads=1, width=8, layout="own", bias="none"),
    Case(lead=(31, 33), queries=1, keys=4, heads=4, layout="own", bias="none"),
    Case(lead=(5, 7), queries=1, keys=33, heads=4, width=64, layout="own", bias="none"),
]
TRUE = {
    "triangle, starting": Case((256,), 256, 256, 4, 32, "row", "shared", "tail"),
    "triangle, ending": Case((256,), 256, 256, 4, 32, "column", "shared", "tail"),
    "MSA rows": Case((128,), 256, 256, 8, 32, "row", "shared", "tail"),
    "MSA columns": Case((256,), 128, 128, 8, 32, "column", "none", "tail"),
    "rows of the extra MSA": Case((512,), 256, 256, 8, 8, "row", "shared", "tail"),
    "triangle of a template": Case((256,), 256, 256, 4, 16, "row", "shared", "tail"),
    "columns of the extra MSA": Case((256,), 8, 1024, 1, 8, "own", "none", "tail"),
    "templates of a pair": Case((256, 256), 1, 4, 4, 16, "own", "none", "random"),
    "a crop of odd length": Case((251,), 251, 251, 4, 32, "row", "shared", "tail"),
}


def found(given: Inputs) -> dict[str, torch.Tensor]:
    """What the kernels make of it."""
    with poisoned(pytest.MonkeyPatch()), dispatch.using("strict"):
        return answers(attention, given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ODD, ids=str)
def test_is_as_exact_as_the_definition(case: Case, dtype: str) -> None:
    given = inputs(case, DTYPES[dtype], "cuda")
    assert not mistakes(given, found(given))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", TRUE)
def test_at_the_models_sizes_and_again_the_same_bit_for_bit(name: str, dtype: str) -> None:
    given = inputs(TRUE[name], DTYPES[dtype], "cuda")
    first = found(given)
    assert not mistakes(given, first)
    again = found(given)
    assert all(torch.equal(first[part], again[part]) for part in first)


def test_global_attention() -> None:
    torch.manual_seed(0)
    q = torch.randn(64, 8, 8, device="cuda").requires_grad_()
    k, v = (torch.randn(600, 64, 8, device="cuda").transpose(0, 1).requires_grad_() for _ in range(2))
    mask = (torch.rand(64, 600, device="cuda") > 0.3).float()
    mask[3] = 0
    with dispatch.using("strict"):
        ours = global_attention(q, k, v, mask)
        gradients = torch.autograd.grad(ours.square().sum(), (q, k, v))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    true = global_attention.definition(*wide, mask)
    for mine, theirs in zip((ours, *gradients), (true, *torch.autograd.grad(true.square().sum(), wide))):
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("turned", [False, True], ids=["starting", "ending"])
def test_past_two_to_the_31_elements(turned: bool) -> None:
    """The projection, the output and every gradient; rows are independent, so a few are compared."""
    n, heads, width = 4112, 4, 32
    c = heads * width
    needed = n * n * 2 * (3 * c + 6 * c)
    if torch.cuda.mem_get_info()[0] < 1.3 * needed:
        pytest.skip(f"{1.3 * needed / 2**30:.0f} GiB of free memory are wanted")
    assert n * n * c > 2**31
    torch.manual_seed(0)
    x = torch.empty(n, n, 3 * c, dtype=torch.bfloat16, device="cuda")
    for part in x:
        part.normal_()
    x = x.transpose(0, 1) if turned else x
    q, k, v = (t.unflatten(-1, (heads, width)) for t in x.split(c, -1))
    bias = torch.randn(n, n, heads, dtype=torch.bfloat16, device="cuda").movedim(-1, 0)[None]
    grad = torch.empty(n, n, heads, width, dtype=torch.bfloat16, device="cuda").normal_()
    mask = torch.ones(n, n, device="cuda")
    mask[-1, n // 2 :] = 0
    ours = found(Inputs(q, k, v, mask, bias, grad))
    for row in (0, n // 2, n - 1):
        one = Inputs(*(t[row : row + 1].clone() for t in (q, k, v, mask)), bias, grad[row : row + 1].clone())
        rest = {name: ours[name][row : row + 1] for name in ("out", "dq", "dk", "dv")}
        assert not mistakes(one, rest)
    total = torch.zeros(bias.shape, dtype=torch.float64, device="cuda")
    for start in range(0, n, 257):
        part = slice(start, start + 257)
        total += found(Inputs(q[part], k[part], v[part], mask[part], bias, grad[part]))["dbias"].double()
    assert float((ours["dbias"].double() - total).norm() / total.norm()) < 1e-2


def test_memory_grows_as_the_pairs_do() -> None:
    def extra(n: int) -> int:
        given = inputs(Case((n,), n, n, 4, 32, "row", "shared", "clear"), torch.bfloat16, "cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found(given)
        return torch.cuda.max_memory_allocated() - before

    assert extra(512) < 4.5 * extra(256)
