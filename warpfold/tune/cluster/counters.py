"""Read what Linux counts of a node's network: packets sent again, and errors of its adapters."""

from collections.abc import Mapping
from pathlib import Path

ROOT = Path("/")
# Of InfiniBand and RoCE ports: errors of the wire, and packets that came twice, late or not at all (Linux's
# Documentation/ABI/stable/sysfs-class-infiniband, and NVIDIA's list of hw_counters).
PORT = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors")
HARDWARE = ("packet_seq_err", "out_of_sequence", "local_ack_timeout_err", "rnr_nak_retry_err", "implied_nak_seq_err")
CARD = ("rx_errors", "tx_errors", "rx_crc_errors", "tx_carrier_errors")


def read_counters(root: Path = ROOT) -> dict[str, int]:
    """Return counts by name, as far as they are there: "tcp sent", "tcp sent again", "mlx5_0 port 1 symbol_error"."""
    found = {}
    lines = [line.split() for line in _text(root / "proc/self/net/snmp").splitlines() if line.startswith("Tcp:")]
    if len(lines) == 2:
        tcp = dict(zip(lines[0][1:], map(int, lines[1][1:])))
        found = {"tcp sent": tcp.get("OutSegs", 0), "tcp sent again": tcp.get("RetransSegs", 0)}
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        for folder, names in (("counters", PORT), ("hw_counters", HARDWARE)):
            for name in names:
                found |= _count(port / folder / name, f"{port.parts[-3]} port {port.name} {name}")
    for card in sorted((root / "sys/class/net").glob("*/statistics")):
        for name in CARD:
            found |= _count(card / name, f"{card.parent.name} {name}")
    return found


def counted(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[tuple[int, int], dict[str, int]]:
    """Return packets sent and sent again between two readings, and the errors that counted up."""
    grown = {name: count - before.get(name, count) for name, count in after.items()}
    tcp = grown.pop("tcp sent", 0), grown.pop("tcp sent again", 0)
    return tcp, {name: count for name, count in grown.items() if count > 0}


def _count(path: Path, name: str) -> dict[str, int]:
    text = _text(path).strip()
    return {name: int(text)} if text.isdigit() else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
