"""Compile on all cores what gpu_session.sh is about to launch, so that no part of it waits for the compiler.

    python benchmarks/gpu_ahead.py --settings monomer --shapes starting:256,... --places pair:256,...

Compiles for the GPU that is there, by its launch table; where there is none, for an H100 by the default table.
"""

import argparse
import os

import torch

from warpfold.cli.common import measured
from warpfold.ops.triton.launch import SHIPPED, table_for
from warpfold.tune.ahead import Shapes, compile_shares

NORMS = ("layer_norm", "norm_linear", "gate", "tail")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", required=True)
    parser.add_argument("--shapes", required=True, help="of attention")
    parser.add_argument("--places", required=True, help="of norms, gates and tails")
    parser.add_argument("--toy", action="store_true", help="one operation: to rehearse")
    arguments = parser.parse_args()
    table, arch = SHIPPED / "default.json", 90
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        table, arch = table_for(torch.device("cuda"))[0].path, 10 * major + minor
    shapes: Shapes = (("gate", "pair:8"),)
    given = None
    if not arguments.toy:
        triangles = tuple(("attention", shape) for shape in arguments.shapes.split(","))
        shapes = triangles + tuple((op, place) for op in NORMS for place in arguments.places.split(","))
        given = measured(arguments.settings, ["plan.precision=bf16"], {}, 1, 0)  # one block launches what all do
    print(compile_shares(shapes, given, table, arch, 1 if arguments.toy else os.cpu_count() or 1))


if __name__ == "__main__":
    main()
