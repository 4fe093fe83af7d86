"""How much memory is free, on a GPU or on the host, and whether an error says that there was none left."""

import ctypes
import os
import platform
from pathlib import Path

import torch

from warpfold.errors import UserError

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
UNLIMITED = 2**60  # bytes; cgroups write such a number where there is no limit
# How torch and the system's libraries say it on a CPU and an Apple GPU, where there is no class for it.
SAID = (
    *("can't allocate memory", "not enough memory", "Cannot allocate memory", "CUDA error: out of memory"),
    "MPS backend out of memory",
)


def free_memory(device: torch.device | str) -> int:
    """Return the bytes that this process could take on a device now, what it holds unused included.

    Of a GPU: what is free at this moment, whoever else works there, and what torch has reserved and does not use.  Of a
    CPU: what the system calls available, or what the cgroup or the process's own limit leave if that is less.  Of an
    Apple GPU: what Metal recommends to use at most, less what torch's tensors hold; it shares the host's memory.
    Errors: UserError where the system does not say.
    """
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return min(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory(), host_memory())
    if device.type != "cpu":
        raise UserError(f"--device {device}: how much memory is free there is not known; give --memory")
    return host_memory()


def memory_in_use(device: torch.device | str) -> int:
    """Return the bytes of a device that this process uses now: of a GPU in tensors, of a CPU all but what was freed.

    Errors: UserError where the system does not say.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type != "cpu" or not (PROC / "self/status").exists():
        raise UserError(f"memory: how much of {device} is in use, this system does not say; leave memory out")
    return _status(PROC, "VmRSS") - _kept(PROC)


def host_memory(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Return the bytes of main memory that this process could take now; without Linux, all that the machine has.

    Errors: UserError where the system does not say.
    """
    if not (proc / "meminfo").exists():
        if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
            raise UserError("how much memory is free, this system does not say; give --memory")
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = next(
        1024 * int(line.split()[1])
        for line in (proc / "meminfo").read_text(encoding="ascii").splitlines()
        if line.startswith("MemAvailable:")
    )
    return max(0, min([available, *_left_by_groups(proc, groups), *_left_by_process(proc)]) + _kept(proc))


def _left_by_groups(proc: Path, groups: Path) -> list[int]:
    """Return the bytes that each limit of this process's cgroups (version 2 or 1) and of their parents leaves."""
    if not (proc / "self/cgroup").exists():
        return []
    found = []
    for line in (proc / "self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = groups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = Path(path.lstrip("/"))  # seen from within a container it may not be there, but the root is
        for folder in dict.fromkeys((root / own, *(root / parent for parent in own.parents), root)):
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None and limit < UNLIMITED:
                found.append(limit - used + _stat(folder / "memory.stat", names[2]))
    return found


def _number(path: Path) -> int | None:
    """Return the number in a file; None without the file, or for "max"."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _stat(path: Path, name: str) -> int:
    """Return one line of memory.stat: what of the files in memory the system gives up when it is asked for memory."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)


def _left_by_process(proc: Path) -> list[int]:
    """Return the bytes that the limit of this process's addresses (`ulimit -v`) leaves, if there is one."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or limit > UNLIMITED:
        return []
    return [limit - _status(proc, "VmSize")]


def _status(proc: Path, name: str) -> int:
    """Return bytes that /proc/self/status names."""
    lines = (proc / "self/status").read_text(encoding="utf-8").splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _kept(proc: Path) -> int:
    """Return the freed bytes that glibc keeps (`device.keep_memory`): no more than are resident."""
    if platform.libc_ver()[0] != "glibc" or not (proc / "self/status").exists():
        return 0
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)  # since glibc 2.33
    if function is None:
        return 0
    function.restype = _Mallinfo
    return min(int(function().fordblks), _status(proc, "RssAnon"))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there was not enough memory, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SAID)


def release_memory(device: torch.device | str) -> None:
    """Give back what torch has reserved on a GPU and does not use."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.empty_cache()
    elif kind == "mps":
        torch.mps.empty_cache()
