"""What a GPU can do: whether torch and the Triton kernels compute on it, and whether it multiplies bf16.

`capabilities` looks at this before any work starts. Dispatch refuses the kernels with its reason, commands print the
reason when they choose their device, and `warpfold doctor` reports it.
"""

import functools
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from warpfold.ops.torch_internals import constant_when_traced

TRITON = importlib.util.find_spec("triton") is not None  # not imported here
NO_TRITON = "triton is not installed; pip install triton"
MIN_MAJOR = 8  # compute capability of the first NVIDIA GPUs with kernels and with bf16 products
AMD_WITH_BF16 = ("gfx90a", "gfx94", "gfx95")  # MI200, MI300, MI350
# An Evoformer block in bf16 on an H200 (benchmarks/results/gpu-h200-2026-11-26.json), definitions over kernels.
SLOWDOWN = "about 6 times slower in predictions and 3 times in training (as measured on an H200)"


@dataclass(frozen=True)
class Capabilities:
    """What a device can do.

    unusable: why torch cannot compute on it, with the remedy; "" if it can.
    no_kernels: why the Triton kernels do not run on a GPU, with the remedy; "" if they do.
    has_bf16: whether it is a GPU that multiplies bf16 faster than fp32.
    """

    unusable: str = ""
    no_kernels: str = ""
    has_bf16: bool = False


@functools.cache
def capabilities(device: torch.device) -> Capabilities:
    """Determine the capabilities of a device. A CUDA device must exist."""
    if device.type != "cuda":
        return Capabilities()
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Capabilities(no_kernels=launch_problem(), has_bf16=properties.gcnArchName.startswith(AMD_WITH_BF16))
    version = f"{properties.major}.{properties.minor}"
    built_for, unusable = torch.cuda.get_arch_list(), ""
    if built_for and not has_code(properties.major, properties.minor, built_for):
        is_newer = all(properties.major > _parse_architecture(name)[1] for name in built_for)
        remedy = "install a newer torch" if is_newer else "install a torch built for CUDA 12.6 (docs/install.md)"
        unusable = (
            f"the {properties.name} has compute capability {version}, and torch {torch.__version__} has code for "
            f"{', '.join(built_for)} only; {remedy}, or give cpu"
        )
    has_bf16 = properties.major >= MIN_MAJOR
    if has_bf16:
        return Capabilities(unusable, launch_problem(), has_bf16)
    reason = f"the {properties.name} has compute capability {version}, and the kernels need {MIN_MAJOR}.0"
    return Capabilities(unusable, reason)


@constant_when_traced
def no_kernels_reason(device: torch.device) -> str | None:
    """Return why the Triton kernels do not run on a GPU, or None."""
    return capabilities(device).no_kernels or None


def slow_notice(device: torch.device) -> str | None:
    """Return the sentence for the user of a GPU on which the kernels do not run, or None."""
    if (reason := capabilities(device).no_kernels) == "":
        return None
    return f"operations are computed in plain torch, {SLOWDOWN}, because {reason}"


def has_code(major: int, minor: int, built_for: Sequence[str]) -> bool:
    """Return whether a torch that is built for these architectures has code for a GPU's compute capability.

    built_for: as of `torch.cuda.get_arch_list`. Machine code (sm_80) runs on GPUs of its major version from its minor
    version on. PTX (compute_80) runs on all later GPUs, too, since the driver compiles it. Code with the suffix "a"
    runs on its own architecture only, and code with the suffix "f" on the GPUs of its major version.
    """
    for name in built_for:
        kind, *built, suffix = _parse_architecture(name)
        if suffix == "a":
            runs = built == [major, minor]
        elif kind == "compute" and not suffix:
            runs = built <= [major, minor]
        else:
            runs = built[0] == major and built[1] <= minor
        if runs:
            return True
    return False


def _parse_architecture(name: str) -> tuple[str, int, int, str]:
    """Parse "sm_90a" into ("sm", 9, 0, "a")."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
    assert match is not None, name
    return match[1], int(match[2]), int(match[3]), match[4]


@functools.cache
def launch_problem() -> str:
    """Find the reason why Triton cannot launch a kernel on this machine, with the remedy; "" if it can.

    At the first launch Triton compiles a C module against Python.h and libcuda, and keeps it in its cache.
    """
    if not TRITON:
        return NO_TRITON
    if problem := _cache_problem():
        return problem
    problem = _compiler_problem() or ("" if torch.version.hip is not None else _libcuda_problem())
    return "" if problem and _is_compiled_already() else problem


def _cache_problem() -> str:
    """Return why Triton cannot write to its cache, or ""."""
    home = Path(os.environ.get("TRITON_HOME") or "~").expanduser()
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return (
            f"the Triton cache {folder} cannot be written ({error.strerror}); set TRITON_CACHE_DIR to a folder that can"
        )


def _compiler_problem() -> str:
    """Return why Triton cannot compile C against Python, looking where Triton looks, or ""."""
    compiler = os.environ.get("CC")
    if compiler is not None and shutil.which(compiler) is None:
        return f"Triton needs a C compiler, and CC={compiler} is not one; install gcc, or unset CC"
    if compiler is None and not (shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler, and there is no gcc or clang; install gcc, or set CC"
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme names a folder below /usr/local that has no headers.
    include = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    searched = [include, *(os.environ.get(name, "") for name in ("CPATH", "C_INCLUDE_PATH"))]
    folders = [Path(folder) for folder in os.pathsep.join(searched).split(os.pathsep) if folder]
    if not any((folder / "Python.h").is_file() for folder in folders):
        package = f"python{sysconfig.get_python_version()}-dev"
        return f"Triton needs Python.h, and {include} has none; install {package} (Fedora: python3-devel)"
    return ""


def _libcuda_problem() -> str:
    """Return why Triton does not find the driver's library, looking where Triton looks, or ""."""
    name = "libcuda.so.1"
    if os.environ.get("TRITON_LIBCUDA_PATH"):
        return ""
    remedy = f"set TRITON_LIBCUDA_PATH to the folder of {name}"
    try:
        lines = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return f"Triton looks for {name} with /sbin/ldconfig, which does not run; {remedy}"
    if any(Path(line.split()[-1]).exists() for line in lines if name in line):
        return ""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if any((Path(folder) / name).exists() for folder in folders if folder):
        return ""
    return f"Triton does not find {name}; {remedy}"


def _is_compiled_already() -> bool:
    """Return whether Triton's cache has the module that it would compile, so that it needs no compiler.

    Before 3.7, Triton also compiles a launcher for each kernel, so a cached module is not enough.
    """
    triton = importlib.import_module("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        return False
    try:
        _ = importlib.import_module("triton.runtime").driver.active.utils
    except (RuntimeError, AssertionError, ImportError, OSError, subprocess.SubprocessError):
        return False
    return True
