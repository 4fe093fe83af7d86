"""How far WarpFold can be trusted, a figure a command; `python -m benchmarks.reliability COMMAND --help` says more.

mutate    plant small faults in the package, one at a time, and see which tests find them
kills     kill -9 at random moments, and compare the continued run with one that was left alone
disk      full disks, jumping clocks, read-only folders, two runs in one folder
"""

import importlib
import sys

COMMANDS = ("mutate", "kills", "disk")

if __name__ == "__main__":
    if sys.argv[1:2] in ([], ["--help"], ["-h"]):
        print(__doc__)
    elif sys.argv[1] not in COMMANDS:
        sys.exit(f"benchmarks.reliability: '{sys.argv[1]}' is none of its commands; give one of {', '.join(COMMANDS)}")
    else:
        sys.exit(importlib.import_module(f"benchmarks.reliability.{sys.argv[1]}").main(sys.argv[2:]))
