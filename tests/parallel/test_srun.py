"""Variables of srun: the tasks of a step are ranks, and a process outside of a step is alone."""

from warpfold.parallel.process import PORTS, first_host, is_one_of_several, tasks_of_nodes
from warpfold.parallel.team import ProcessInfo

JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "gpu[01-02]", "SLURM_NTASKS": "6", "SLURM_NTASKS_PER_NODE": "3"}
# The shell of sbatch, and that of salloc if srun starts it: Slurm's variables describe task 0 of a job of six.
OWN = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"}
SHELL = {**JOB, **OWN, "SLURM_TASKS_PER_NODE": "3(x2)"}
IN_STEP = {**SHELL, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}


def task(node: int, local: int, tasks: str = "3(x2)", nodes: str = "gpu[01-02]", **more: str) -> dict[str, str]:
    """Return srun's variables for a task of a step, in addition to those of the job's shell."""
    number = str(sum(tasks_of_nodes(tasks)))
    step = {"SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": number, "SLURM_STEP_TASKS_PER_NODE": tasks}
    own = {"SLURM_STEP_NODELIST": nodes, "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
    # Only their number matters.
    own["SLURM_GTIDS"] = ",".join(map(str, range(tasks_of_nodes(tasks)[node])))
    return {**SHELL, **step, **own, **more}


def read(variables: dict[str, str]) -> ProcessInfo:
    return ProcessInfo.from_environment(variables)


def test_tasks_are_ranks_node_by_node() -> None:
    found = [read(task(node, local)) for node in range(2) for local in range(3)]
    assert [one.rank for one in found] == list(range(6))
    assert {(one.ranks, one.ranks_per_node, one.address, one.agent_keeps_store) for one in found} == {
        (6, 3, "gpu01", False)
    }
    assert [one.local_rank for one in found] == [0, 1, 2] * 2
    assert len({one.port for one in found}) == 1


def test_unequal_nodes_and_tasks_that_slurm_deals_out_in_turn() -> None:
    cyclic = [(0, 0, "0"), (1, 0, "1"), (0, 1, "2"), (1, 1, "3"), (0, 2, "4")]
    found = {number: read(task(node, local, "3,2", SLURM_PROCID=number)) for node, local, number in cyclic}
    assert [found[number].rank for number in "02413"] == [0, 1, 2, 3, 4]
    assert [found[number].on_node for number in "04"] == [range(3)] * 2
    assert [found[number].on_node for number in "13"] == [range(3, 5)] * 2


def test_in_a_shell_a_process_is_alone() -> None:
    """Without Slurm, on a login node, and in the shells of sbatch and salloc."""
    for variables in ({}, JOB, SHELL, IN_STEP):
        assert read(variables) == ProcessInfo()
        assert not is_one_of_several(variables)
    # Also in a job that a task has submitted, which inherits the variables of the task's step.
    assert read({**task(0, 0), **OWN, "SLURM_JOB_ID": "4712"}) == ProcessInfo()


def test_what_torchrun_says() -> None:
    assert ProcessInfo.from_environment({"HOME": "/"}) == ProcessInfo()
    said = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    more = {"MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert ProcessInfo.from_environment(said | more) == ProcessInfo(3, 4, 1, 2, "a", 29500, True)


def test_variables_that_a_job_manager_leaves_to_one_process_do_no_harm() -> None:
    alone: list[dict[str, str]] = [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "", "RANK": "", "MASTER_ADDR": "", "MASTER_PORT": "", "LOCAL_RANK": ""},
        {"WORLD_SIZE": " ", "RANK": "0"},
        {"SLURM_STEP_NUM_TASKS": ""},
    ]
    for variables in alone:
        assert read(variables) == ProcessInfo()
        assert not is_one_of_several(variables)
    assert read(task(1, 2) | {"RANK": "", "WORLD_SIZE": "", "MASTER_ADDR": ""}).rank == 5


def test_torchrun_is_believed_first() -> None:
    """A torchrun that srun starts on each node, as in scripts of other programs."""
    ranks = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    found = read({**task(1, 0, "1(x2)"), **ranks, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert found == ProcessInfo(9, 16, 1, 8, "10.0.0.1", 29500)
    alone = {**ranks, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert not is_one_of_several({**task(1, 0, "1(x2)"), **alone})


def test_a_script_may_say_where_they_meet_and_on_one_node_no_name_has_to_be_known() -> None:
    """Many scripts set the address and the number of processes, which does not determine the rank."""
    said = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501", "WORLD_SIZE": "6"}
    found = read(task(1, 2, **said))
    assert (found.rank, found.address, found.port) == (5, "10.0.0.1", 29501)
    assert read(task(0, 1, "4", "gpu07")).address == "127.0.0.1"


def test_other_steps_and_jobs_meet_at_other_ports() -> None:
    ports = {
        read(task(0, 0, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step))).port
        for job in (10_000_000, 10_000_001, 10_000_002)
        for step in range(50)
    }
    assert len(ports) == 150
    assert ports <= set(PORTS)


def test_slurms_lists_are_read() -> None:
    for nodes, first in {
        "gpu07": "gpu07",
        "gpu[07-09,12],big1": "gpu07",
        "big1,gpu[07-09]": "big1",
        "gpu[7,9].org": "gpu7.org",
        "rack[2-3]-node[01-16]": "rack2-node01",
        "10.0.0.1": "10.0.0.1",
    }.items():
        assert first_host(nodes) == first
    for text, tasks in {"8": [8], "8(x2),4": [8, 8, 4], "1,2(x3)": [1, 2, 2, 2]}.items():
        assert tasks_of_nodes(text) == tasks
