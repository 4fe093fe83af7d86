"""Read a process's rank, the number of processes and the address of the rendezvous from torchrun's or srun's variables.

srun's variables are translated into torchrun's. Slurm also sets variables that describe the whole job. In a shell of
`sbatch` or `salloc`, SLURM_PROCID is 0 and SLURM_NTASKS may be 16, although a process started there is alone. Variables
that begin with SLURM_STEP describe the tasks that srun has started, so only these are used. A shell started by srun
(`srun --pty bash`, or `salloc` on many clusters) is a step of one task. A job that was submitted by a task inherits the
variables of that task's step. SLURM_GTIDS, which lists the tasks that Slurm itself has started here, distinguishes the
two.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from warpfold.errors import UserError


@dataclass(frozen=True)
class ProcessInfo:
    """Rank, number of ranks and rendezvous address of a process. By default it is the only process.

    local_rank: rank within the machine, which is also the index of the GPU.
    ranks_per_node: number of processes on this machine. After the rendezvous, the greatest number that divides the
    processes of every machine (`distributed_context`).
    address, port: of the store where the processes meet. agent_keeps_store: torchrun's agent runs it instead of rank 0.
    idle: number of further processes, with higher ranks, that the plan does not use (`Team.wait_idle`).
    """

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    ranks_per_node: int = 1
    address: str = ""
    port: int = 0
    agent_keeps_store: bool = False
    idle: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether the plan does not use this process."""
        return self.rank >= self.ranks

    @property
    def on_node(self) -> range:
        """The ranks on this process's machine."""
        return range(self.rank - self.local_rank, self.rank - self.local_rank + self.ranks_per_node)

    @property
    def keeper(self) -> str:
        """Name of the process that runs the rendezvous store."""
        return f"torchrun's agent at {self.address}:{self.port}" if self.agent_keeps_store else "rank 0"

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> "ProcessInfo":
        """Read the environment variables of torchrun, otherwise those of srun; without either the process is alone.

        Empty variables, which some job managers leave, count as unset. WORLD_SIZE=1 needs no MASTER_ADDR.
        Raises UserError for variables that are incomplete, not numbers, or contradict each other.
        """
        variables = without_empty({**variables, **torchrun_from_srun(variables)})
        if "WORLD_SIZE" not in variables:
            return cls()

        def wrong(name: str, problem: str) -> UserError:
            return UserError(
                f"environment variable {name}: {problem}. Start several processes with torchrun or srun; for a single "
                "process: unset WORLD_SIZE RANK"
            )

        def read(name: str, default: str | None = None) -> str:
            """Return the value of a required variable."""
            text = variables.get(name, default)
            if text is None:
                raise wrong(name, f"not set, though WORLD_SIZE={variables['WORLD_SIZE']}")
            return text

        def number(name: str, default: str | None = None) -> int:
            """Parse a variable as a whole number."""
            text = read(name, default)
            if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
                raise wrong(name, f"{text!r} is not a whole number")
            return int(text)

        ranks = number("WORLD_SIZE")
        rank = number("RANK", "0" if ranks == 1 else None)
        if rank >= ranks:
            raise wrong("RANK", f"{rank}, but WORLD_SIZE={ranks}")
        if ranks == 1:
            return cls()
        return cls(
            rank=rank,
            ranks=ranks,
            local_rank=number("LOCAL_RANK", "0"),
            ranks_per_node=number("LOCAL_WORLD_SIZE", "1"),
            address=read("MASTER_ADDR"),
            port=number("MASTER_PORT"),
            agent_keeps_store=variables.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
        )


TASKS = "SLURM_STEP_NUM_TASKS"
# Ports of the rendezvous store if MASTER_PORT is not set, below the range from which Linux assigns ephemeral ports.
# Steps of a job and consecutive jobs use different ports.
PORTS = range(10_000, 30_000)
# Ports reserved for the steps of one job before those of the next job. A prime, so that ports rarely repeat.
PORTS_PER_JOB = 101


def without_empty(variables: Mapping[str, str]) -> dict[str, str]:
    """Remove empty variables, which scripts of job managers may set."""
    return {name: value for name, value in variables.items() if value.strip()}


def is_one_of_several(variables: Mapping[str, str]) -> bool:
    """Return whether torchrun or srun has started several processes."""
    variables = without_empty(variables)
    return variables.get("WORLD_SIZE", variables.get(TASKS, "1")) != "1"


def torchrun_from_srun(variables: Mapping[str, str]) -> dict[str, str]:
    """Translate srun's variables into torchrun's; returns no variables for a single process.

    Ranks are counted node by node for any `srun --distribution`, because plans assume that neighbouring ranks share a
    node. Rank 0 is Slurm's task 0. MASTER_ADDR and MASTER_PORT take precedence if they are set.
    Raises UserError for variables that are incomplete or contradict each other.
    """
    variables = without_empty(variables)
    if "RANK" in variables or variables.get(TASKS, "1") == "1":
        return {}
    try:
        tasks, node = tasks_of_nodes(variables["SLURM_STEP_TASKS_PER_NODE"]), int(variables["SLURM_NODEID"])
        local, node_tasks = int(variables["SLURM_LOCALID"]), tasks[node]
        number = PORTS_PER_JOB * int(variables["SLURM_JOB_ID"]) + int(variables["SLURM_STEP_ID"])
        first = "127.0.0.1" if len(tasks) == 1 else first_host(variables["SLURM_STEP_NODELIST"])
        if sum(tasks) != int(variables[TASKS]) or local >= node_tasks:
            raise ValueError
    except (KeyError, ValueError, IndexError) as error:
        reason = (
            f"{error.args[0]} is missing" if isinstance(error, KeyError) else "Slurm's other variables contradict it"
        )
        raise UserError(
            f"environment variable {TASKS}={variables[TASKS]}: {reason}. Start with srun or torchrun; for a single "
            f"process: unset {TASKS}"
        ) from None
    if "SLURM_GTIDS" in variables and len(variables["SLURM_GTIDS"].split(",")) != node_tasks:
        return {}
    return {
        "RANK": str(sum(tasks[:node]) + local),
        "WORLD_SIZE": variables[TASKS],
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(node_tasks),
        "MASTER_ADDR": variables.get("MASTER_ADDR", first),
        "MASTER_PORT": variables.get("MASTER_PORT", str(PORTS[number % len(PORTS)])),
    }


def tasks_of_nodes(text: str) -> list[int]:
    """Parse the tasks of each node, which Slurm writes as "8(x2),4". Raises ValueError for any other format."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(text)
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def first_host(nodes: str) -> str:
    """Return the first host of a node list in Slurm's notation: "gpu07" for "gpu[07-09,12],big1"."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]
