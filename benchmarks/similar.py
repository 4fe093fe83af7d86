"""Time the clustering of sequences against their number, by WarpFold and by MMseqs2.

    python -m benchmarks.similar --here 1000 4000 16000 --mmseqs 4000 16000 64000 --out benchmarks/results/NAME.json

The sequences are generated: the sizes of families follow a power law, the lengths are log-normal (30 to 1,500), and
members have 45 to 98 % of their ancestor's residues, half of them with a gap. Times are CPU seconds, of one process for
WarpFold and of all processes for MMseqs2. Each measurement has its own process.

* members: the number of sequences that join another one.
* alike: the share of 400 of these that `pairwise.similar` accepts.
"""

import argparse
import json
import platform
import random
import resource
import subprocess
import sys
from datetime import date
from pathlib import Path

import numpy as np

from warpfold.data.similar import clusters
from warpfold.data.similar.pairwise import similar

LETTERS = np.frombuffer(b"ARNDCQEGHILKMFPSTWYV", np.uint8)


def generated(count: int) -> list[str]:
    """Generate a number of sequences."""
    rng = np.random.default_rng(0)
    found: list[str] = []
    while len(found) < count:
        members, length = min(int(rng.zipf(1.7)), 200), int(np.clip(rng.lognormal(5.3, 0.6), 30, 1500))
        ancestor = rng.integers(0, 20, length)
        found.append(LETTERS[ancestor].tobytes().decode())
        for _ in range(members - 1):
            one = np.where(rng.random(length) < rng.uniform(0.45, 0.98), ancestor, rng.integers(0, 20, length))
            if rng.random() < 0.5:
                begin = int(rng.integers(0, length - 10))
                one = np.delete(one, np.s_[begin : begin + int(rng.integers(1, length // 12 + 2))])
            found.append(LETTERS[one].tobytes().decode())
    return found[:count]


def measured(by: str, count: int) -> dict[str, float | str]:
    """Cluster a number of sequences by WarpFold ("here") or by MMseqs2 ("mmseqs")."""
    clusters.MAX_SEQUENCES = sys.maxsize if by == "here" else 0
    sequences = generated(count)
    before = _cpu()
    found = clusters.cluster_sequences(sequences, threads=2)
    seconds = _cpu() - before
    joined = [
        (sequences[leader], sequence) for leader, sequence in zip(found, sequences) if sequences[leader] != sequence
    ]
    some = random.Random(0).sample(joined, 400)
    most = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "by": clusters.clustering_program(sequences) or "here",
        "sequences": count,
        "seconds": round(seconds, 1),
        "sequences per second": round(count / seconds),
        "clusters": len(set(found)),
        "members": len(joined),
        "alike": sum(similar(*pair) for pair in some) / len(some),
        "peak, MB": round(most / 1e3),
    }


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", type=int, nargs="*", default=[1000, 4000, 16000])
    parser.add_argument("--mmseqs", type=int, nargs="*", default=[4000, 16000, 64000])
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--one", nargs=2, metavar=("BY", "COUNT"), help="for this script itself")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measured(given.one[0], int(given.one[1]))))
        return
    results = []
    for by, counts in (("here", given.here), ("mmseqs", given.mmseqs)):
        for count in counts:
            run = [sys.executable, "-m", "benchmarks.similar", "--one", by, str(count)]
            results.append(json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout))
            print(results[-1], flush=True)
    about = {"what": "clusters of sequences", "date": date.today().isoformat(), "machine": platform.machine()}
    if given.out:
        given.out.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
