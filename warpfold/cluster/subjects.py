"""Group the facts of all ranks by the subjects of the rules: ranks, GPUs, nodes, adapters, ports, links."""

import re
import statistics
from collections import Counter
from collections.abc import Sequence

from warpfold.cluster.facts import Facts
from warpfold.cluster.links import MeasuredLinks, Where
from warpfold.cost.links import Link
from warpfold.progress import format_gb

# Distances between a GPU and the nearest adapter.
SWITCH, BRIDGE, FAR, UNKNOWN = range(4)
# Open files for libraries, stores and logs, and three sockets for each other rank.
FILES, FILES_PER_RANK = 400, 3
DMA_BUF_LINUX = [5, 12]
# First version of NCCL that chooses the GID of RoCE v2 by itself.
CHOOSES_GID = (2, 21)


def subjects_of(facts: Sequence[Facts]) -> dict[str, list[Facts]]:
    """Group the facts of all ranks in their order. Each subject includes the facts of its rank.

    A subject that is not a rank has a label for findings.
    """
    on_node: dict[int, list[Facts]] = {}
    for x in facts:
        on_node.setdefault(x["node"], []).append(x)
    first = {node: node_facts[0] for node, node_facts in on_node.items()}
    sharing = Counter((x["node"], x["gpu"]["address"]) for x in facts if x["gpu"])
    ranks = []
    for x in facts:
        node_facts, adapters = on_node[x["node"]], first[x["node"]]["adapters"]
        cores = {core for other in node_facts for core in other["cores"]}
        names = [adapter["name"] for adapter in adapters]
        ranks.append({
            **x,
            "several nodes": len(first) > 1,
            "adapters": names,
            "adapters words": ", ".join(names) or "none",
            "network cards": x["cards"],
            "network cards words": ", ".join(x["cards"]) or "none",
            "visible": x["variables"].get("CUDA_VISIBLE_DEVICES", "not set"),
            "sharing": sharing[x["node"], x["gpu"]["address"]] if x["gpu"] else 1,
            "threads of node": sum(other["threads"] for other in node_facts),
            "cores of node": len(cores),
            "threads wanted": max(1, len(cores) // len(node_facts)),
            "files needed": FILES + FILES_PER_RANK * (len(facts) - 1),
            "locked words": format_gb(x["locked"] or 0),
            "shared words": format_gb(x["shared"]),
            "distance": _distance(x, adapters),
        })  # fmt: skip
    nodes = [
        {
            **ranks[x["rank"]],
            "label": f"node {node} ({x['host']})",
            "dma-buf": x["open modules"] and x["linux"] >= DMA_BUF_LINUX,
        }
        for node, x in first.items()
    ]
    gpus = [x for x in ranks if x["kind"] == "cuda"]
    adapters = []
    for x in first.values():
        for adapter in x["adapters"]:
            states = [port["state"] for port in adapter["ports"]] or ["no port"]
            label = f"{adapter['name']} ({adapter['pci']['address']}) at {x['host']}"
            is_up = "ACTIVE" in states
            adapters.append({**x, **adapter, **adapter["pci"], "label": label, "is up": is_up, "state": states[0]})
    active_names = {adapter["name"] for adapter in adapters if adapter["is up"]}
    for adapter in adapters:
        # An adapter that is down on all nodes is probably unused, unless all adapters are down.
        adapter["is up elsewhere"] = not active_names or adapter["name"] in active_names
    ports = [{**adapter, **port} for adapter in adapters for port in adapter["ports"] if port["state"] == "ACTIVE"]
    index = next((value for x in ranks if (value := x["variables"].get("NCCL_IB_GID_INDEX")) not in (None, "-1")), "")
    versions = [tuple(map(int, re.findall(r"\d+", x["software"]["NCCL"])[:2])) for x in gpus]
    for port in ports:
        port["v2"] = next((number for number, kind in port["gids"].items() if "v2" in kind), "")
        port["index"], port["old NCCL"] = index, any(version < CHOOSES_GID for version in versions)
    cards = [
        {**x, **x["gpu"], "virtual": first[x["node"]]["virtual"], "label": f"GPU {x['gpu']['address']} at {x['host']}"}
        for x in gpus if x["gpu"]
    ]  # fmt: skip
    bridges = {(x["host"], address): {**x, "label": f"{address} at {x['host']}", "redirects": redirects}
               for x in gpus for address, redirects in x["bridges"].items()}  # fmt: skip
    return {
        "ranks": ranks,
        "nodes": nodes,
        "gpus": gpus,
        "wired nodes": nodes if adapters else [],
        "wired gpus": gpus if adapters else [],
        "wired gpu nodes": nodes if adapters and gpus else [],
        "unwired gpus": [] if adapters else gpus,
        "adapters": adapters,
        "gpu adapters": adapters if gpus else [],
        "ports": ports,
        "ethernet ports": [port for port in ports if port["is ethernet"]],
        "pci devices": [*cards, *adapters] if gpus else [],
        "bridges": list(bridges.values()),
    }


def _distance(x: Facts, adapters: Sequence[Facts]) -> int:
    """Compute the distance between the GPU of a rank and the nearest adapter that is up and that NCCL may use."""
    active = [a for a in adapters if any(port["state"] == "ACTIVE" for port in a["ports"])]
    if choice := x["variables"].get("NCCL_IB_HCA"):
        names = selected(choice, [a["name"] for a in active])
        active = [a for a in active if a["name"] in names]
    gpu, distances = x["gpu"], [UNKNOWN]
    for adapter in active if gpu else []:
        pci = adapter["pci"]
        if any(ours == other for ours, other in zip(gpu["path"][:-1], pci["path"][:-1])):
            distances.append(SWITCH)
        elif gpu["host bridge"] and gpu["host bridge"] == pci["host bridge"]:
            distances.append(BRIDGE)
        else:
            distances.append(FAR)
    return min(distances)


def selected(value: str, names: Sequence[str]) -> list[str]:
    """Select the cards or adapters that NCCL uses for a variable's value.

    The value lists prefixes of names. "=" in front means exact names, and "^" all others. The port of an adapter
    ("mlx5_0:1") is ignored.
    """
    excludes, value = value.startswith("^"), value.removeprefix("^")
    exact, value = value.startswith("="), value.removeprefix("=")
    words = [word.strip().partition(":")[0] for word in value.split(",") if word.strip()]
    fits = {name for name in names for word in words if (name == word if exact else name.startswith(word))}
    return [name for name in names if (name in fits) != excludes]


def link_subjects(links: MeasuredLinks, promised: Link | None, hosts: Sequence[str]) -> dict[str, list[Facts]]:
    """Group the measured links. promised: expected link between nodes. hosts: of the nodes."""
    subjects: dict[str, list[Facts]] = {"pairs within": [], "pairs between": [], "linked nodes": []}
    kinds: tuple[Where, ...] = ("within", "between")
    for reach in kinds:
        pairs = links.pairs_of(reach)
        median = statistics.median([pair.bandwidth for pair in pairs] or [0.0])
        late = statistics.median([pair.latency for pair in pairs] or [0.0])
        subjects[f"pairs {reach}"] = [
            {
                "label": f"ranks {pair.first} and {pair.second}",
                "rate": pair.bandwidth,
                "median": median,
                # Processes on the CPUs of one machine have no wire that could be broken.
                "is wire": reach == "between" or links.device != "cpu",
                "words": f"{pair.bandwidth / 1e9:.3g} GB/s, the median is {median / 1e9:.3g} GB/s",
                "median words": f"{median / 1e9:.3g} GB/s, latency {late * 1e6:.3g} µs (medians, pairs: {len(pairs)})",
            }
            for pair in pairs
        ]
    for node, rate in enumerate(links.node_bandwidths):
        subjects["linked nodes"].append({
            "label": f"node {node} ({hosts[node]})",
            "rate": rate,
            "promised": promised.bandwidth if promised else 0.0,
            "words": f"{rate / 1e9:.3g} GB/s to another node while all ranks send",
            "least words": f"{min(links.node_bandwidths) / 1e9:.3g} GB/s",
            "promised words": f"{promised.bandwidth / 1e9:.3g} GB/s" if promised else "",
        })  # fmt: skip
    return subjects


def folder_subjects(trials: Sequence[Facts]) -> dict[str, list[Facts]]:
    """Group the ranks' observations of the folder of a run."""
    ranks = [{**x, "free words": f"{format_gb(x['free'] or 0)} free"} for x in trials]
    return {"folder": ranks, "folder readers": [x for x in ranks[1:] if x["sees"] and not x["error"]]}
