"""Describe the machine that a figure was measured on."""

import importlib
import importlib.util
import platform
import subprocess
from pathlib import Path

import torch

from warpfold.ops.triton.launch import table_for


def describe(device: torch.device) -> dict[str, str]:
    """Return the device, the driver, versions, and the launch table in use."""
    found = {"device": name(device)}
    if device.type == "cuda":
        found["driver"] = driver()
        properties = torch.cuda.get_device_properties(device)
        found["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        found["capability"] = f"{properties.major}.{properties.minor}"
    else:
        found["threads"] = str(torch.get_num_threads())
    found["torch"] = torch.__version__
    found["triton"] = version("triton")
    found["python"] = platform.python_version()
    if device.type == "cuda":
        table, why = table_for(device)
        found["launches"] = f"{table.path.name} ({why})"
    return found


def name(device: torch.device) -> str:
    """Return the GPU's name, "NVIDIA H200", or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8").splitlines() if cpus.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor() or platform.machine()}, {len(models) or '?'} cores"


def driver() -> str:
    """Return the version of the GPU's driver; "not known" where nvidia-smi does not say."""
    try:
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return "not known"
    return said.stdout.split()[0] if said.stdout.split() else "not known"


def version(package: str) -> str:
    """Import a package and return its version; "not installed" if it is not."""
    if importlib.util.find_spec(package) is None:
        return "not installed"
    return str(getattr(importlib.import_module(package), "__version__", "not known"))
