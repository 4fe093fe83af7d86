"""Emulate two nodes on one machine by network namespaces with a link of a chosen rate and delay.

The link is a process that forwards packets between two TUN devices, limits their rate and delays each of them. Unlike
`netem`, TUN is available in nearly all kernels. Packets have 64 KB, so that one core forwards several Gb/s.
"""

import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what forked ranks would else load each for itself
import torch.distributed as dist

NODES = tuple(f"warpfold-{os.getpid()}-{number}" for number in (0, 1))  # several may emulate at a time
DEVICE, MTU = "wftun{}", 65_000
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000  # linux/if_tun.h, sched.h
BACKLOG = 1e-3  # seconds of packets that wait in the link; more wait at their sender's, as behind a real card


@dataclass(frozen=True)
class Shape:
    """The rate of a link in Gb/s, and its delay one way in milliseconds."""

    gigabits: float
    milliseconds: float

    def __str__(self) -> str:
        return f"{self.gigabits:g} Gb/s, {self.milliseconds:g} ms"


def refusal() -> str | None:
    """Return the reason why namespaces are not available, or None."""
    if shutil.which("ip") is None:
        return "there is no `ip` command (iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun is not there or not permitted"
    attempt = f"{NODES[0]}-attempt"
    done = subprocess.run(["ip", "netns", "add", attempt], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"network namespaces are not permitted: {done.stderr.strip()}"
    _ip("netns", "del", attempt)
    return None


def enter(node: int) -> None:
    """Move this process into a node and select its network device for gloo."""
    with open(f"/run/netns/{NODES[node]}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE.format(node)


@contextmanager
def linked(shape: Shape) -> Iterator[None]:
    """Create the two nodes and forward packets between them over a link of this shape, within the context."""
    with ExitStack() as stack:
        ends = []
        _remove_left_over()
        for number, name in enumerate(NODES):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            device = DEVICE.format(number)
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            stack.callback(os.close, end)
            fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH14x", device.encode(), IFF_TUN | IFF_NO_PI))
            ends.append(end)
            _ip("link", "set", device, "netns", name)
            for args in (
                ("addr", "add", f"10.77.0.{number + 1}/24", "dev", device),
                ("link", "set", device, "mtu", str(MTU), "up"),
                ("link", "set", "lo", "up"),
            ):
                _ip("-n", name, *args)
            for buffer in ("tcp_rmem", "tcp_wmem"):  # room for all that a long link holds
                command = ["sysctl", "-qw", f"net.ipv4.{buffer}=4096 16777216 67108864"]
                subprocess.run(["ip", "netns", "exec", name, *command], check=True, capture_output=True)
        relay = get_context("fork").Process(target=_carry, args=(ends, shape), daemon=True)
        relay.start()
        stack.callback(relay.join)
        stack.callback(relay.kill)
        yield


def run_ranks(work: Callable[..., Iterator[Any]], ranks: int, shape: Shape | None, *args: Any) -> Iterator[Any]:
    """Run `work(*args)` on several forked ranks with gloo and one thread each, and yield the results of rank 0.

    Half of the ranks are on each of two nodes with a link of this shape. None: loopback, without nodes.
    Errors: RuntimeError if a rank fails. The rank prints its error.
    """
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder, nullcontext() if shape is None else linked(shape):
        ours, theirs = context.Pipe(duplex=False)
        common = (ranks, shape is not None, f"{folder}/store", theirs, work, args)
        processes = [context.Process(target=_a_rank, args=(rank, *common), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        theirs.close()
        try:
            with suppress(EOFError):  # all have ended
                while True:
                    yield ours.recv()
            for process in processes:
                process.join()
        finally:
            for process in processes:
                process.kill()
                process.join()
        if failed := {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}:
            raise RuntimeError(f"ranks failed, with exit codes: {failed}")


def _a_rank(
    rank: int,
    ranks: int,
    on_nodes: bool,
    store: str,
    pipe: Connection,
    work: Callable[..., Iterator[Any]],
    args: Sequence[Any],
) -> None:
    torch.set_num_threads(1)
    if on_nodes:
        enter(rank * 2 // ranks)
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # whatever this machine's name resolves to
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    for found in work(*args):
        if rank == 0:
            pipe.send(found)
    dist.barrier()
    dist.destroy_process_group()


def over_the_link() -> int:
    """Return the bytes that this node has sent and received over the link; 0 without nodes."""
    lines = [line.split() for line in Path("/proc/self/net/dev").read_text().splitlines()]
    return sum(int(line[1]) + int(line[9]) for line in lines if line[0].startswith(DEVICE.format("")))


def _remove_left_over() -> None:
    """Remove the nodes of killed runs."""
    for left in Path("/run/netns").glob("warpfold-*-*"):
        if not Path("/proc", left.name.split("-")[1]).exists():
            _ip("netns", "del", left.name)


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


@dataclass
class _Way:
    """One direction of the link: the packets in flight with their arrival times, and the time for the next packet."""

    source: int
    target: int
    per_byte: float
    packets: deque[tuple[float, bytes]] = field(default_factory=deque)
    free: float = 0.0


def _carry(ends: Sequence[int], shape: Shape) -> None:
    """Forward packets until killed, with a higher priority than other processes: real links do not wait for a CPU."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    delay = shape.milliseconds / 1e3
    ways = [_Way(*ends, 8e-9 / shape.gigabits), _Way(*reversed(ends), 8e-9 / shape.gigabits)]
    while True:
        now = time.monotonic()
        open_ways = [way for way in ways if way.free < now + BACKLOG]
        times = [way.packets[0][0] for way in ways if way.packets]
        times += [way.free - BACKLOG for way in ways if way not in open_ways]
        pause = max(0.0, min(times) - now) if times else None
        ready = select.select([way.source for way in open_ways], [], [], pause)[0]
        now = time.monotonic()
        for way in ways:
            if way.source in ready:
                packet = os.read(way.source, MTU)
                way.free = max(now, way.free) + len(packet) * way.per_byte
                way.packets.append((way.free + delay, packet))
            while way.packets and way.packets[0][0] <= now:
                with suppress(OSError):  # the other node is not up yet, or gone: a packet lost, as elsewhere
                    os.write(way.target, way.packets.popleft()[1])
