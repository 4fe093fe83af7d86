"""What a process of a run is told by whatever started it: its number, how many there are, and where they meet.

torchrun says it in variables of its own; srun's are told in torchrun's words.  Wherever a job of Slurm's runs there are
variables that speak of the whole job: in the shell of `sbatch` or `salloc` SLURM_PROCID is 0 and SLURM_NTASKS perhaps
16, though a process that is started there is alone.  What begins with SLURM_STEP is of what srun started, so only that
is believed.  A shell that srun starts (`srun --pty bash`, or `salloc` on many clusters) is a step of one task.  A job
that a task has submitted inherits what was said of that task's step; SLURM_GTIDS, the tasks that Slurm itself has
started here, tells it from one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from warpfold.errors import UserError


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

        A job manager may leave empty variables, which count as unset, or WORLD_SIZE=1 without MASTER_ADDR, since one
        process has nobody to meet.
        Errors: UserError for variables that are incomplete, not numbers, or contradict each other.
        """
        variables = without_empty({**variables, **of_srun(variables)})
        if "WORLD_SIZE" not in variables:
            return cls()

        def wrong(name: str, problem: str) -> UserError:
            return UserError(
                f"environment variable {name}: {problem}. Start several processes with torchrun or srun; for a single "
                "process: unset WORLD_SIZE RANK"
            )

        def read(name: str, default: str | None = None) -> str:
            """Return the text of a variable that must be there."""
            text = variables.get(name, default)
            if text is None:
                raise wrong(name, f"not set, though WORLD_SIZE={variables['WORLD_SIZE']}")
            return text

        def number(name: str, default: str | None = None) -> int:
            """Return the whole number that a variable holds."""
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
# Of the store where the processes meet, if MASTER_PORT does not say it: below those that Linux gives to whoever asks
# for any.  Steps of a job, and jobs that follow each other, have others.
PORTS = range(10_000, 30_000)
STEPS = 101  # a prime: so many steps of a job come before a port of the next job


def without_empty(variables: Mapping[str, str]) -> dict[str, str]:
    """Leave out variables that are set to nothing, as scripts of job managers leave them."""
    return {name: value for name, value in variables.items() if value.strip()}


def is_one_of_several(variables: Mapping[str, str]) -> bool:
    """Return whether torchrun or srun says that this process has others beside it."""
    variables = without_empty(variables)
    return variables.get("WORLD_SIZE", variables.get(TASKS, "1")) != "1"


def of_srun(variables: Mapping[str, str]) -> dict[str, str]:
    """Translate srun's variables into torchrun's for a process that was started beside others; else return none.

    Ranks are counted node by node, however `srun --distribution` deals tasks out, since plans take neighbours to be on
    one node; rank 0 is Slurm's task 0.  MASTER_ADDR and MASTER_PORT are kept where they are set.
    Errors: UserError for variables that are incomplete, or contradict each other.
    """
    variables = without_empty(variables)
    if "RANK" in variables or variables.get(TASKS, "1") == "1":
        return {}
    try:
        tasks, node = tasks_of_nodes(variables["SLURM_STEP_TASKS_PER_NODE"]), int(variables["SLURM_NODEID"])
        local, each = int(variables["SLURM_LOCALID"]), tasks[node]
        number = STEPS * int(variables["SLURM_JOB_ID"]) + int(variables["SLURM_STEP_ID"])
        first = "127.0.0.1" if len(tasks) == 1 else first_host(variables["SLURM_STEP_NODELIST"])
        if sum(tasks) != int(variables[TASKS]) or local >= each:
            raise ValueError
    except (KeyError, ValueError, IndexError) as error:
        why = f"{error.args[0]} is missing" if isinstance(error, KeyError) else "the variables beside it do not fit it"
        raise UserError(
            f"{TASKS}={variables[TASKS]}, but {why}; start with srun or torchrun, or unset {TASKS} for a process that "
            "is to be alone"
        ) from None
    if "SLURM_GTIDS" in variables and len(variables["SLURM_GTIDS"].split(",")) != each:
        return {}
    return {
        "RANK": str(sum(tasks[:node]) + local),
        "WORLD_SIZE": variables[TASKS],
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(each),
        "MASTER_ADDR": variables.get("MASTER_ADDR", first),
        "MASTER_PORT": variables.get("MASTER_PORT", str(PORTS[number % len(PORTS)])),
    }


def tasks_of_nodes(text: str) -> list[int]:
    """Return the tasks of each node, which Slurm writes as "8(x2),4".  Errors: ValueError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        read = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if read is None:
            raise ValueError(text)
        found += [int(read[1])] * int(read[2] or 1)
    return found


def first_host(nodes: str) -> str:
    """Return the first name of a list of nodes as Slurm writes it: "gpu[07-09,12],big1" is "gpu07"."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]
