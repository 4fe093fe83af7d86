"""The card of trained parameters: all that somebody who gets them must know, in one page of Markdown."""

import json
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from warpfold import __version__
from warpfold.data.load.order import Source
from warpfold.engine.checkpoint import RunFolder
from warpfold.files import sha256
from warpfold.settings import toml_value

# Settings that a reader of the card looks for; all are in the run's settings.toml.
SHOWN = {
    "data": ("crop", "max_msa", "max_extra", "max_templates"),
    "optim": ("name", "learning_rate", "accumulate", "warmup_steps", "decay", "clip_norm", "average", "average_decay"),
    "plan": ("precision", "recompute", "data", "axial", "branch", "batch"),
    "train": ("steps", "seed", "order", "validate_every", "patience"),
}
LICENCE = "that of the parameters it started from (DeepMind's: CC BY 4.0), and what the structures allow"


def card_page(
    title: str,
    said: str,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[str],
    values: Mapping[str, Any],
    command: str,
) -> str:
    """Lay out a card: what it says first, facts with their names, sections, some of the settings, and the command."""
    lines = [f"# {title}", "", said, "", "| | |", "|---|---|", *(f"| {name} | {fact} |" for name, fact in facts), ""]
    lines += [*sections, "## Settings", "", "```toml"]
    for section, names in SHOWN.items():
        known = ((name, values[section].get(name)) for name in names)
        lines += [f"[{section}]", *(f"{name} = {toml_value(value)}" for name, value in known if value is not None), ""]
    lines += ["```", "", "## Made by", "", "```bash", command or "# from Python", "```", ""]
    return "\n".join(lines)


def run_card(
    run: RunFolder,
    values: Mapping[str, Any],
    sources: Sequence[Source],
    held_out: int,
    init: Path | None,
    device: torch.device | str,
    ranks: int,
    command: str,
) -> str:
    """Return the card of a run that has finished, whose files are all written.  values: its settings."""
    log = (run.path / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [row for row in map(json.loads, log.splitlines()) if row["kind"] in ("step", "validation")]
    steps = [row for row in rows if row["kind"] == "step"]
    validations = [row for row in rows if row["kind"] == "validation" and row.get("lddt_ca") is not None]
    scores = {row["step"]: row["lddt_ca"] for row in validations}
    counts = {row["step"]: len(row["examples"]) for row in validations}  # there may have been no time for all
    best, _ = run.best()
    said = f"{len(steps):,} steps of {values['optim']['accumulate']} examples; "
    if scores:
        last = max(scores)
        said += f"mean lDDT-Cα of held-out entries {scores[last]:.4f} after step {last:,}"
        said += f", and at best {scores[best]:.4f}, after step {best:,}." if best in scores else "."
    else:
        said += "nothing was validated."
    files = [path for name in ("params", "params_best") if (path := run.path / f"{name}.safetensors").exists()]
    total = sum(source.weight for source in sources)
    facts = [
        *(("parameters", f"`{path.name}`, sha256 `{sha256(path)}`") for path in files),
        ("started from", f"`{init.name}`, sha256 `{sha256(init)}`" if init else "weights drawn by the seed"),
        ("licence", LICENCE if init else "what the structures allow: it started from no other parameters"),
    ]
    for source in sources:
        where = f"`{source.store.path.name}`, {len(source.keys)} entries, {source.weight / total:.0%} of the examples"
        facts += [("data", f"{where}, checksum of `store.json` `{source.store.checksum}`")]
    on = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else str(device)
    seconds = sum(len(row["examples"]) / row["samples_per_second"] for row in steps)
    mean = math.fsum(row["waiting"] for row in steps) / max(1, len(steps))
    facts += [
        ("held out", f"{held_out} entries"),
        ("machine", f"{on}, {ranks} x {torch.get_num_threads()} threads, {platform.platform()}"),
        ("versions", f"WarpFold {__version__}, torch {torch.__version__}, Python {platform.python_version()}"),
        ("seconds", f"{seconds:,.0f} of steps, {mean:.0%} of them waiting for examples"),
    ]
    sections = []
    if scores:
        sections = ["## Validations", "", "| step | lDDT-Cα | entries | |", "|---|---|---|---|"]
        for step in sorted({min(scores), *({best} & scores.keys()), max(scores)}):
            said_of = "the best" if step == best else ""
            sections.append(f"| {step:,} | {scores[step]:.4f} | {counts[step]} of {held_out} | {said_of} |")
        sections.append("")
    return card_page("Trained parameters", said, facts, sections, values, command)
