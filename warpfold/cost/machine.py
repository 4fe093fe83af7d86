"""Describe the machine of a measurement or of a plan."""

import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from warpfold.cost.links import LINKS, Cluster, network
from warpfold.cost.measured_rates import measured
from warpfold.cost.memory import kind_of
from warpfold.cost.rates import SHEETS, Rates, of_gpu, sheet_of
from warpfold.cost.record import Device
from warpfold.device import device_meant, sysctl, unsupported_on_mps
from warpfold.errors import UserError
from warpfold.memory import free_memory, host_memory
from warpfold.ops.triton.launch import table_for
from warpfold.parallel.plan import Precision, resolve_precision
from warpfold.progress import format_gb

# Default devices per node and default link between nodes, those of a DGX H100.
DEFAULT_NODE_DEVICES, DEFAULT_LINK = 8, "ib400"
# Fraction of the host's free memory that offloaded tensors may use.
HOST_SHARE = 0.8


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices for which a plan is made: a number of equal devices. Devices that differ count as the smallest.

    kind: "cpu", "cuda" or "mps". free: bytes that a run may use on each device. host: bytes for offloaded tensors in
    host memory, or on disk for a CPU; None if unknown. loaded: the model's weights are already loaded and not included
    in `free`. name: of the device. how: source of the values.
    here: whether it is this machine, so that its rates can be measured.
    """

    kind: Device
    free: int
    devices: int = 1
    host: int | None = None
    loaded: bool = False
    name: str = ""
    how: str = "given"
    here: bool = False

    def rates(self, dtype: torch.dtype, tell: Callable[[str], None] = lambda what: None) -> Rates | None:
        """Return the rates of a device: measured on this machine, otherwise from the data sheet; None if unknown.

        tell: called with the name of each measurement before it starts.
        """
        if self.here and self.name and self.kind != "mps":
            return measured(self.kind, dtype, tell=tell)
        return of_gpu(self.name) if sheet_of(self.name) else None

    @property
    def prediction_precision(self) -> Precision:
        """Default precision of predictions on the device."""
        # All GPUs with a data sheet have bf16 matrix units.
        if self.kind == "cuda" and not self.here:
            return "bf16"
        return resolve_precision("auto", self.kind)

    def __str__(self) -> str:
        """Format as "4 x H100, 80.0 GB each (data sheet)"."""
        many = f"{self.devices} x " if self.devices > 1 else ""
        suffix = " each" if self.devices > 1 else ""
        return f"{many}{self.name or self.kind}, {format_gb(self.free)}{suffix} ({self.how})"


def this_machine(device: torch.device | str, loaded: bool = False, memory: int | None = None) -> Machine:
    """Describe one device of this machine with its free memory.

    memory: upper limit of the used bytes. Raises UserError if the system does not report free memory.
    """
    device = torch.device(device)
    kind = kind_of(device.type)
    free = free_memory(device)
    host = int(HOST_SHARE * host_memory()) if kind == "cuda" else shutil.disk_usage(tempfile.gettempdir()).free
    memory_source = "free now" if memory is None or free <= memory else "given"
    return Machine(kind=kind, free=free if memory is None else min(free, memory), host=host, loaded=loaded,
                   name=device_name(device), how=memory_source, here=True)  # fmt: skip


def planned_machine(device: str | None, memory: int | None, devices: int) -> Machine:
    """Describe the machine of a plan: devices of this machine, or of another one by their name.

    device: "cpu", "cuda", "mps", or the name of a GPU; None means this machine's. memory: bytes of each device.
    Raises UserError for an unknown name, or for a device of another machine without `memory`.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if reason := unsupported_on_mps(kind_of(device), {f"--devices {devices}": devices > 1}):
        raise UserError(reason)
    here_now = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if here_now.get(device.partition(":")[0], False):
        try:
            present = this_machine(device)
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"--device {device}: {str(error).splitlines()[0]}. Pass another device, or cpu.") from error
        free, memory_source = (present.free, present.how) if memory is None else (memory, "given")
        return replace(present, free=free, devices=devices, how=memory_source)
    if device.startswith(("cuda", "mps")):
        if memory is None:
            raise UserError(f"--device {device}: this machine has none. Pass the memory of the device: --memory 24GB.")
        return Machine(kind=kind_of(device), free=memory, devices=devices)
    if not (sheet := sheet_of(device)):
        if meant := device_meant(device):
            raise UserError(f"--device {device}: not known. Pass {meant}.")
        raise UserError(
            f"--device {device}: not known. Pass cpu, cuda or one of {', '.join(SHEETS)}; for another GPU, pass "
            "--device cuda --memory 24GB."
        )
    memory_source = "data sheet" if memory is None else "given"
    return Machine(
        kind="cuda", free=memory or int(SHEETS[sheet].memory), devices=devices, name=sheet, how=memory_source
    )


def planned_cluster(machine: Machine, per_node: int | None = None, link: str | None = None) -> Cluster:
    """Describe the nodes and links of planned devices, by default nodes as in a DGX H100.

    link: between nodes, as in `network`. Raises UserError for an unknown link.
    """
    link_within = LINKS["gloo" if machine.kind == "cpu" else "NVLink 4"]
    if sheet_of(machine.name):
        link_within = of_gpu(machine.name).link
    node_devices = min(per_node or DEFAULT_NODE_DEVICES, machine.devices)
    link_between = network(link or DEFAULT_LINK, node_devices)
    return Cluster(
        ranks=machine.devices, per_node=node_devices, within=link_within, between=link_between, device=machine.name
    )


def describe(device: torch.device) -> dict[str, str]:
    """Describe the device, its driver, the versions of the software, and the launch table in use."""
    facts = {"device": device_name(device)}
    if device.type == "cuda":
        facts["driver"] = driver()
        properties = torch.cuda.get_device_properties(device)
        facts["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        facts["capability"] = f"{properties.major}.{properties.minor}"
    elif device.type == "mps":
        facts["memory"] = format_gb(torch.mps.recommended_max_memory())
    else:
        facts["threads"] = str(torch.get_num_threads())
    facts["torch"] = torch.__version__
    facts["triton"] = package_version("triton")
    facts["python"] = platform.python_version()
    if device.type == "cuda":
        table, reason = table_for(device)
        facts["launches"] = f"{table.path.name} ({reason})"
    return facts


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, such as "NVIDIA H200", or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return f"GPU of an {sysctl('machdep.cpu.brand_string') or 'Apple processor'}"
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8").splitlines() if cpus.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine()
    return f"{model}, {len(models) or os.cpu_count() or '?'} cores"


def driver() -> str:
    """Return the version of the GPU's driver according to nvidia-smi, or "not known"."""
    try:
        result = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return "not known"
    return result.stdout.split()[0] if result.stdout.split() else "not known"


def package_version(package: str) -> str:
    """Import a package and return its version, or "not installed"."""
    if importlib.util.find_spec(package) is None:
        return "not installed"
    return str(getattr(importlib.import_module(package), "__version__", "not known"))
