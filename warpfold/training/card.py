"""Cards of trained parameters: their origin, data, settings and results, as one page of Markdown."""

import json
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from warpfold import __version__
from warpfold.data.load.order import Source
from warpfold.files import sha256
from warpfold.settings import toml_value

# The settings that a reader of the card looks for.  The run's settings.toml has all of them.
SHOWN_SETTINGS = {
    "data": ("crop", "max_msa", "max_extra", "max_templates"),
    "optim": ("name", "learning_rate", "accumulate", "warmup_steps", "decay", "clip_norm", "average", "average_decay"),
    "plan": ("precision", "recompute", "data", "axial", "branch", "batch"),
    "train": ("steps", "seed", "order", "validate_every", "patience"),
}
LICENCE = "that of the parameters it started from (DeepMind's: CC BY 4.0), and what the structures allow"


def run_card(
    run: Path,
    values: Mapping[str, Any],
    sources: Sequence[Source],
    *,
    held_out: int,
    init: Path | None,
    device: torch.device | str,
    ranks: int,
    command: str,
    best: int,
    title: str = "Trained parameters",
    verdict: str = "",
    parameters: Sequence[Path] = (),
    facts: Sequence[tuple[str, str]] = (),
    sections: Sequence[str] = (),
) -> str:
    """Write the card of a finished run as Markdown, from the files in the run's folder.

    values: the run's settings.  sources: the training data.  held_out: number of validation examples.  best: step of
    the best validation.  Fine-tuning passes its title, its verdict on the result, its parameter file (default: the
    run's own files), and further facts and sections.
    """
    log = (run / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [row for row in map(json.loads, log.splitlines()) if row["kind"] in ("step", "validation")]
    steps = [row for row in rows if row["kind"] == "step"]
    validations = [row for row in rows if row["kind"] == "validation" and row.get("lddt_ca") is not None]
    scores = {row["step"]: row["lddt_ca"] for row in validations}
    # A validation without enough time has fewer examples than are held out.
    counts = {row["step"]: len(row["examples"]) for row in validations}
    count = values["optim"]["accumulate"]
    training = f"{len(steps):,} steps of {count} example{'' if count == 1 else 's'}; "
    if scores:
        last = max(scores)
        training += f"mean lDDT-Cα of held-out entries {scores[last]:.4f} after step {last:,}"
        training += f", and at best {scores[best]:.4f}, after step {best:,}." if best in scores else "."
    else:
        training += "nothing was validated."
    if not parameters:
        names = ("params.safetensors", "params_best.safetensors")
        parameters = [path for name in names if (path := run / name).exists()]
    total = sum(source.weight for source in sources)
    rows_of_facts = [
        *(("parameters", f"`{path.name}`, sha256 `{sha256(path)}`") for path in parameters),
        ("started from", f"`{init.name}`, sha256 `{sha256(init)}`" if init else "weights drawn by the seed"),
        ("licence", LICENCE if init else "what the structures allow: it started from no other parameters"),
    ]
    for source in sources:
        source_text = (
            f"`{source.store.path.name}`, {len(source.keys)} entries, {source.weight / total:.0%} of the examples"
        )
        rows_of_facts += [("data", f"{source_text}, checksum of `store.json` `{source.store.checksum}`")]
    processor = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else str(device)
    seconds = sum(len(row["examples"]) / row["samples_per_second"] for row in steps)
    waiting = math.fsum(row["waiting"] for row in steps) / max(1, len(steps))
    rows_of_facts += [
        *facts,
        ("held out", f"{held_out} entries"),
        ("machine", f"{processor}, {ranks} x {torch.get_num_threads()} threads, {platform.platform()}"),
        ("versions", f"WarpFold {__version__}, torch {torch.__version__}, Python {platform.python_version()}"),
        ("seconds", f"{seconds:,.0f} of steps, {waiting:.0%} of them waiting for examples"),
    ]
    lines = [f"# {title}", ""]
    lines += [verdict, ""] if verdict else []
    lines += [training, "", "| | |", "|---|---|", *(f"| {name} | {fact} |" for name, fact in rows_of_facts), ""]
    lines += sections
    if scores:
        lines += ["## Validations", "", "| step | lDDT-Cα | entries | |", "|---|---|---|---|"]
        for step in sorted({min(scores), *({best} & scores.keys()), max(scores)}):
            note = "the best" if step == best else ""
            lines.append(f"| {step:,} | {scores[step]:.4f} | {counts[step]} of {held_out} | {note} |")
        lines.append("")
    lines += ["## Settings", "", "```toml"]
    for section, keys in SHOWN_SETTINGS.items():
        items = ((key, values[section].get(key)) for key in keys)
        lines += [f"[{section}]", *(f"{key} = {toml_value(value)}" for key, value in items if value is not None), ""]
    lines += ["```", "", "## Made by", "", "```bash", command or "# from Python", "```", ""]
    return "\n".join(lines)
