"""The card of fine-tuned parameters: all that somebody who gets them must know, in one page of Markdown."""

from collections.abc import Mapping
from typing import Any

from warpfold.data.store.store import Store
from warpfold.files import checksum
from warpfold.finetuning.page import PARTS, labels_in_words, verdict
from warpfold.finetuning.split import Split
from warpfold.settings import toml_value

# Settings that a reader of the card looks for; all are in summary.json and run/settings.toml.
SHOWN = {
    "data": ("crop", "max_msa", "max_extra", "max_templates"),
    "optim": ("name", "learning_rate", "accumulate", "warmup_steps", "decay", "clip_norm", "average_decay"),
    "plan": ("precision", "recompute"),
    "train": ("steps", "validate_every", "patience"),
}


def card(result: Mapping[str, Any], store: Store, split: Split) -> str:
    """Return the card; result: what is in summary.json."""
    values, versions, machine = result["settings"], result["versions"], result["machine"]
    tuned = values["finetune"]
    lines = [
        "# Fine-tuned parameters",
        "",
        verdict(result),
        "",
        "| | |",
        "|---|---|",
        f"| parameters | `params.safetensors`, sha256 `{result['params']['sha256']}` |",
        f"| started from | `{result['init']['file']}`, sha256 `{result['init']['sha256']}` |",
        "| licence | that of the parameters it started from (DeepMind's: CC BY 4.0), and what the structures allow |",
        f"| entries | {', '.join(f'{len(keys)} {name}' for name, keys in split.parts.items())} |",
        f"| split | by {split.by}, in `split.toml` |",
        f"| data | {len(store)} records, checksum of `store/store.json` `{checksum(store.path / 'store.json')}` |",
        f"| what was trained | {', '.join(tuned['trainable']) or 'adapters alone'} |",
        f"| steps | {result['steps']:,}; the best by validation, and so kept, {result['params']['step']:,} |",
        f"| machine | {machine['device']}, {machine['threads']} threads, {machine['system']} |",
        f"| versions | WarpFold {versions['warpfold']}, torch {versions['torch']}, Python {versions['python']} |",
        f"| seconds | {', '.join(f'{name} {value:.0f}' for name, value in result['seconds'].items())} |",
        "",
    ]
    for kind, scores in result["compared"].items():
        lines += [
            f"## {PARTS[kind].capitalize()}",
            "",
            "| mean of | before | after | difference | 95 % interval | better / worse / of |",
            "|---|---|---|---|---|---|",
        ]
        for name, one in scores.items():
            low, high = one["interval"] or (float("nan"),) * 2
            lines.append(
                f"| {name} | {one['before']:.4f} | {one['after']:.4f} | {one['difference']:+.4f} "
                f"| {low:+.4f} to {high:+.4f} | {one['wins']} / {one['losses']} / {one['targets']} |"
            )
        lines.append("")
    if result["labels"]:
        lines += ["## Labels of the test", "", labels_in_words(result["labels"]), ""]
    lines += ["## Settings", "", "```toml"]
    for section, names in SHOWN.items():
        known = ((name, values[section].get(name)) for name in names)
        lines += [f"[{section}]", *(f"{name} = {toml_value(value)}" for name, value in known if value is not None), ""]
    lines += ["```", "", "## Made by", "", "```bash", result["command"] or "# from Python", "```", ""]
    return "\n".join(lines)
