"""What a process of a run is told by whatever started it: its number, how many there are, and where they meet."""

from collections.abc import Mapping
from dataclasses import dataclass

from warpfold.errors import UserError
from warpfold.parallel.srun import of_srun


@dataclass(frozen=True)
class ProcessInfo:
    """What torchrun or srun tells a process of itself and of the others; the default: it is alone."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0  # on its machine; also the number of its GPU
    ranks_per_node: int = 1  # on its machine; after the meeting: that share one, wherever (`distributed_context`)
    address: str = ""  # of the store where they meet
    port: int = 0
    agent_keeps_store: bool = False  # torchrun's agent does, and not rank 0
    idle: int = 0  # more processes, after these ranks, for which the plan has no use (`Team.wait_idle`)

    @property
    def is_idle(self) -> bool:
        """Whether the plan has no use for it."""
        return self.rank >= self.ranks

    @property
    def on_node(self) -> range:
        """The ranks on this process's machine."""
        return range(self.rank - self.local_rank, self.rank - self.local_rank + self.ranks_per_node)

    @property
    def keeper(self) -> str:
        """Who keeps the store where they meet."""
        return f"torchrun's agent at {self.address}:{self.port}" if self.agent_keeps_store else "rank 0"

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> "ProcessInfo":
        """Read the environment variables that torchrun sets, or else srun; without them the process is alone.

        Errors: UserError for variables that are incomplete or not numbers.
        """
        variables = {**variables, **of_srun(variables)}
        if "WORLD_SIZE" not in variables:
            return cls()
        try:
            return cls(
                rank=int(variables["RANK"]),
                ranks=int(variables["WORLD_SIZE"]),
                local_rank=int(variables.get("LOCAL_RANK", 0)),
                ranks_per_node=int(variables.get("LOCAL_WORLD_SIZE", 1)),
                address=variables["MASTER_ADDR"],
                port=int(variables["MASTER_PORT"]),
                agent_keeps_store=variables.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
            )
        except (KeyError, ValueError) as error:
            raise UserError(f"WORLD_SIZE is set, but {error} is missing or not a number; start with torchrun") from None
