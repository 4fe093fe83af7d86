"""Record the output of commands: `python -m tests.recorded [NAME ...]`, by default of all."""

import os
import sys
import tempfile
from pathlib import Path

from tests.recorded.commands import COMMANDS, make_inputs, run

RECORDS = Path(__file__).parent / "records"
for name in sys.argv[1:] or COMMANDS:
    with tempfile.TemporaryDirectory() as temporary:
        (folder := Path(temporary) / "folder").mkdir()
        os.chdir(folder)
        (RECORDS / f"{name}.txt").write_text(run(folder, name, make_inputs(folder)), encoding="utf-8")
        os.chdir(RECORDS.parent)
    print(name, (RECORDS / f"{name}.txt").stat().st_size)
