"""Free memory of a GPU or the host, and recognition of out-of-memory errors."""

import ctypes
import os
import platform
from pathlib import Path

import torch

from warpfold.errors import UserError

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Bytes; larger limits of cgroups mean that there is no limit.
UNLIMITED = 2**60
# Messages of torch and system libraries on a CPU and an Apple GPU, which have no exception class for it.
OUT_OF_MEMORY = (
    *("can't allocate memory", "not enough memory", "Cannot allocate memory", "CUDA error: out of memory"),
    "MPS backend out of memory",
)


def free_memory(device: torch.device | str) -> int:
    """Compute the bytes that this process can allocate on a device now, including memory that it has cached.

    GPU: the memory that is free at this moment, plus torch's reserved but unused memory. CPU: the available memory of
    the system, or less if the limits of the cgroup or the process leave less. Apple GPU: Metal's recommended maximum
    less the memory of torch's tensors, bounded by the host's memory, which it shares.
    Raises UserError if the system does not report it.
    """
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return min(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory(), host_memory())
    if device.type != "cpu":
        raise UserError(f"--device {device}: cannot determine its free memory. Pass --memory.")
    return host_memory()


def memory_in_use(device: torch.device | str) -> int:
    """Compute the bytes that this process uses on a device: tensors on a GPU, all memory that is not freed on a CPU.

    Raises UserError if the system does not report it.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type != "cpu" or not (PROC / "self/status").exists():
        raise UserError(f"memory: this system does not report the used memory of {device}. Omit `memory`.")
    return _status(PROC, "VmRSS") - _cached_bytes(PROC)


def host_memory(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Compute the bytes of host memory that this process can allocate now; without Linux, all memory of the machine.

    Raises UserError if the system does not report it.
    """
    if not (proc / "meminfo").exists():
        if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
            raise UserError("memory: this system does not report its free memory. Pass --memory.")
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = next(
        1024 * int(line.split()[1])
        for line in (proc / "meminfo").read_text(encoding="ascii").splitlines()
        if line.startswith("MemAvailable:")
    )
    return max(0, min([available, *_left_by_groups(proc, groups), *_left_by_process(proc)]) + _cached_bytes(proc))


def _left_by_groups(proc: Path, groups: Path) -> list[int]:
    """List the bytes that the limits of this process's cgroups (version 2 or 1) and their parents leave."""
    if not (proc / "self/cgroup").exists():
        return []
    remaining = []
    for line in (proc / "self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = groups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Within a container this path may not exist, but the root does.
        group_path = Path(path.lstrip("/"))
        for folder in dict.fromkeys((root / group_path, *(root / parent for parent in group_path.parents), root)):
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None and limit < UNLIMITED:
                # Inactive file pages count as used, but the system frees them on demand.
                remaining.append(limit - used + _stat(folder / "memory.stat", names[2]))
    return remaining


def _number(path: Path) -> int | None:
    """Read the number in a file; None if the file is missing or contains "max"."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _stat(path: Path, name: str) -> int:
    """Read a value of memory.stat; 0 if it is missing."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)


def _left_by_process(proc: Path) -> list[int]:
    """List the bytes that the limit of the address space (`ulimit -v`) leaves; empty without a limit."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or limit > UNLIMITED:
        return []
    return [limit - _status(proc, "VmSize")]


def _status(proc: Path, name: str) -> int:
    """Read a number of bytes from /proc/self/status."""
    lines = (proc / "self/status").read_text(encoding="utf-8").splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _cached_bytes(proc: Path) -> int:
    """Return the freed bytes that glibc keeps for reuse (`device.keep_memory`), at most the resident ones."""
    if platform.libc_ver()[0] != "glibc" or not (proc / "self/status").exists():
        return 0
    # Available since glibc 2.33.
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is None:
        return 0
    function.restype = _Mallinfo
    return min(int(function().fordblks), _status(proc, "RssAnon"))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a GPU or the host ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def release_memory(device: torch.device | str) -> None:
    """Release memory that torch has reserved on a GPU and does not use."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.empty_cache()
    elif kind == "mps":
        torch.mps.empty_cache()
