"""Read what Linux counts of a node's network: packets lost, and errors of its adapters."""

from collections.abc import Mapping
from pathlib import Path

ROOT = Path("/")
# Of InfiniBand and RoCE ports: errors of the wire, and packets that came twice, late or not at all (Linux's
# Documentation/ABI/stable/sysfs-class-infiniband, and NVIDIA's list of hw_counters).
PORT = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors")
HARDWARE = ("packet_seq_err", "out_of_sequence", "local_ack_timeout_err", "rnr_nak_retry_err", "implied_nak_seq_err")
CARD = ("rx_errors", "tx_errors", "rx_crc_errors", "tx_carrier_errors")


def read_counters(root: Path = ROOT) -> dict[str, int]:
    """Return counts by name, as far as they are there: "tcp sent", "tcp lost", "mlx5_0 port 1 symbol_error".

    What TCP sends again has been lost, or was only late: then its receiver says that it had it (RFC 2883).
    """
    found = {}
    if tcp := _tcp(root / "proc/self/net/snmp", "Tcp:"):
        more = _tcp(root / "proc/self/net/netstat", "TcpExt:")
        late = more.get("TCPDSACKRecvSegs", more.get("TCPDSACKRecv", 0))
        found = {"tcp sent": tcp.get("OutSegs", 0), "tcp lost": tcp.get("RetransSegs", 0) - late}
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        for folder, names in (("counters", PORT), ("hw_counters", HARDWARE)):
            for name in names:
                found |= _count(port / folder / name, f"{port.parts[-3]} port {port.name} {name}")
    for card in sorted((root / "sys/class/net").glob("*/statistics")):
        for name in CARD:
            found |= _count(card / name, f"{card.parent.name} {name}")
    return found


def counted(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[tuple[int, int], dict[str, int]]:
    """Return packets sent and lost between two readings, and the errors that counted up."""
    grown = {name: count - before.get(name, count) for name, count in after.items()}
    tcp = grown.pop("tcp sent", 0), max(0, grown.pop("tcp lost", 0))
    return tcp, {name: count for name, count in grown.items() if count > 0}


def _tcp(path: Path, kind: str) -> dict[str, int]:
    """Return what a line of names and a line of counts say, which both begin with the kind."""
    lines = [line.split()[1:] for line in _text(path).splitlines() if line.startswith(kind)]
    return dict(zip(lines[0], map(int, lines[1]))) if len(lines) == 2 else {}


def _count(path: Path, name: str) -> dict[str, int]:
    text = _text(path).strip()
    return {name: int(text)} if text.isdigit() else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
