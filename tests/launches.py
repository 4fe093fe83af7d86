"""Count the operations that a GPU would launch, and find the largest tensor that they create."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations that launch no kernel: they only allocate or alias memory.
NOTHING = ("empty", "detach", "_unsafe_view", "_reshape_alias")


class Launches(TorchDispatchMode):
    """Context that counts operations other than views.  Each of them launches at least one kernel.

    operations: the count of each operation.  largest: the number of elements of the largest result, and its operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.largest = (0, "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        schema = func._schema
        is_view = not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)
        if not is_view and not schema.name.split("::")[1].startswith(NOTHING):
            self.operations[schema.name] += 1
            made = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)]
            self.largest = max(self.largest, (max(made, default=0), schema.name))
        return out

    @property
    def count(self) -> int:
        """Return the total number of operations."""
        return self.operations.total()
