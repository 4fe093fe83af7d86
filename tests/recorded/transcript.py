"""Turn the output of a command into text that is the same on every machine, and compare two such texts."""

import html
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

# Values that differ between runs or machines.
UNSTABLE_KEYS = {
    *("seconds", "date", "begun", "ended", "versions", "machine", "host", "memory", "speed", "pid", "threads"),
    *("computing", "waiting_for_features", "waiting_for_files", "pack.json", "pack.tsv"),
    *("checksums", "sources.json", "free", "time", "waiting", "waiting_so_far", "samples_per_second"),
}
UNSTABLE_TEXT = (
    (re.compile(r"(?<![\w.])[0-9a-f]{16,64}\b"), "HASH"),
    (re.compile(r"\b\d+(\.\d+)?( s| seconds?| ms| min)\b"), "TIME"),
    (re.compile(r"\b\d{1,2}:\d\d(:\d\d)?\b"), "TIME"),
    (re.compile(r"\b20\d\d-\d\d-\d\d\b"), "DATE"),
    (re.compile(r"\btorch \d\S*"), "torch VERSION"),
    (re.compile(r"(?<=torch VERSION )Python .*"), "Python VERSION: COMMAND"),
    (re.compile(r"\| seconds \| .*"), "| seconds | TIME |"),
    (re.compile(r"\d+\.\d GB"), "MEMORY"),
    # The time of a run heads its page. Parts that take no time are left out of the foot of another page.
    (re.compile(r"(?<=seconds in all\n)\d+"), "TIME"),
    (re.compile(r" · (packing|training|folding) TIME"), ""),
)
# One in this number of the atoms of a structure is compared.
ATOMS = 40
# Longer lists of numbers are compared by their mean and root mean square.
LONG = 8
# Files with more arrays hold parameters, whose arrays are compared together.
MANY = 100
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
# Printed values may differ by one unit of their last digit and by this fraction: the rounding of fp32 differs between
# machines, and passes through a whole model.
TOLERANCE = 2e-3
# Larger counts, such as those of clashing atoms, follow from rounded positions and may differ by this fraction, too.
LARGE = 500


def transcript(folder: Path, printed: str) -> str:
    """Describe the printed text without the lines of progress, and all files of a folder, sorted by name."""
    # Intermediate checkpoints of a run hold what the last parameters hold. Cached searches are named by a hash.
    paths = sorted(
        path for path in folder.rglob("*") if path.is_file() and not {"checkpoints", "cache"} & {*path.parts}
    )
    files = [f"== {path.relative_to(folder).as_posix()}\n{_content(path)}" for path in paths]
    lines = (line for line in printed.splitlines() if not line.startswith("["))
    return _stable("\n".join([*lines, *files])).replace(str(folder.parent), "FOLDER") + "\n"


def _content(path: Path) -> str:
    """Describe the content of a file; pictures and binary formats of others only by their presence."""
    if path.suffix == ".json":
        return json.dumps(_stable_values(json.loads(path.read_text())), indent=1)
    if path.suffix == ".jsonl":
        return "\n".join(json.dumps(_stable_values(json.loads(line))) for line in path.read_text().splitlines())
    if path.suffix in (".npz", ".safetensors"):
        arrays = dict(np.load(path, allow_pickle=False)) if path.suffix == ".npz" else load_file(path)
        if len(arrays) > MANY:
            values = np.concatenate([array.ravel() for array in arrays.values() if array.dtype.kind == "f"])
            return f"{len(arrays)} arrays, together {_summary(values)}"
        return "\n".join(f"{name} {_summary(array)}" for name, array in sorted(arrays.items()))
    if path.suffix == ".html":
        text = re.sub(r"<(script|style|svg)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL)
        lines = (html.unescape(line).strip() for line in re.sub(r"<[^>]*>", "\n", text).splitlines())
        return "\n".join(line for line in lines if line)
    if path.suffix in (".cif", ".pdb"):
        lines = path.read_text().splitlines()
        atoms = [line for line in lines if line.startswith("ATOM")]
        return "\n".join([*(line for line in lines if not line.startswith("ATOM")), *atoms[::ATOMS]])
    if path.suffix in (".txt", ".log", ".toml", ".md", ".csv", ".fasta", ".a3m", ".sto", ".bibtex"):
        return path.read_text()
    return "present"


def _stable_values(value: Any) -> Any:
    """Replace values that differ between runs."""
    if isinstance(value, dict):
        return {key: "UNSTABLE" if key in UNSTABLE_KEYS else _stable_values(item) for key, item in value.items()}
    if isinstance(value, list) and len(value) > LONG and all(isinstance(item, int | float) for item in value):
        return _summary(np.array(value))
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return [_stable_values(item) for item in value] if isinstance(value, list) else value


def _summary(array: np.ndarray) -> str:
    """Describe an array by its type, shape, mean and root mean square."""
    if array.dtype.kind not in "fiub" or not array.size:
        return f"{array.dtype} {array.shape}"
    values = array.astype(np.float64)
    return f"{array.dtype} {array.shape} {np.nanmean(values):.4g} {np.sqrt(np.nanmean(values**2)):.4g}"


def _stable(text: str) -> str:
    """Replace parts of a text that differ between runs."""
    for pattern, replacement in UNSTABLE_TEXT:
        text = pattern.sub(replacement, text)
    return text


def differences(found: str, expected: str) -> list[str]:
    """List the lines that differ.  Numbers with a fraction may differ by rounding; everything else is exact."""
    found_lines, expected_lines = found.splitlines(), expected.splitlines()
    different = [
        f"line {i + 1}: {a!r}, recorded: {b!r}"
        for i, (a, b) in enumerate(zip(found_lines, expected_lines))
        if not _same_line(a, b)
    ]
    if len(found_lines) != len(expected_lines):
        different.append(f"{len(found_lines)} lines, recorded: {len(expected_lines)}")
    return different


def _same_line(found: str, expected: str) -> bool:
    """Compare the words of two lines exactly, and their numbers within the rounding."""
    if NUMBER.sub("0", found) != NUMBER.sub("0", expected):
        return False
    return all(_same_number(a, b) for a, b in zip(NUMBER.findall(found), NUMBER.findall(expected)))


def _same_number(found: str, expected: str) -> bool:
    if found == expected:
        return True
    if not {".", "e"} & {*expected}:
        smaller = min(abs(float(found)), abs(float(expected)))
        return smaller > LARGE and math.isclose(float(found), float(expected), rel_tol=TOLERANCE)
    decimals = len(expected.partition("e")[0].partition(".")[2])
    unit = 10.0 ** (int(expected.partition("e")[2] or 0) - decimals)
    return abs(float(found) - float(expected)) <= 1.01 * unit + TOLERANCE * abs(float(expected))
