"""The card of fine-tuned parameters: all that somebody who gets them must know, in one page of Markdown."""

from collections.abc import Mapping
from typing import Any

from warpfold.data.store.store import Store
from warpfold.engine.card import LICENCE, card_page
from warpfold.finetuning.page import PARTS, verdict
from warpfold.finetuning.split import Split


def card(result: Mapping[str, Any], store: Store, split: Split) -> str:
    """Return the card; result: what is in summary.json."""
    values, versions, machine = result["settings"], result["versions"], result["machine"]
    tuned = values["finetune"]
    facts = [
        ("parameters", f"`params.safetensors`, sha256 `{result['params']['sha256']}`"),
        ("started from", f"`{result['init']['file']}`, sha256 `{result['init']['sha256']}`"),
        ("licence", LICENCE),
        ("entries", ", ".join(f"{len(keys)} {name}" for name, keys in split.parts.items())),
        ("split", f"by {split.by}, in `split.toml`"),
        ("data", f"{len(store)} records, checksum of `store/store.json` `{store.checksum}`"),
        ("what was trained", ", ".join(tuned["trainable"]) or "adapters alone"),
        ("steps", f"{result['steps']:,}; the best by validation, and so kept, {result['params']['step']:,}"),
        ("machine", f"{machine['device']}, {machine['threads']} threads, {machine['system']}"),
        ("versions", f"WarpFold {versions['warpfold']}, torch {versions['torch']}, Python {versions['python']}"),
        ("seconds", ", ".join(f"{name} {value:.0f}" for name, value in result["seconds"].items())),
    ]
    lines = list[str]()
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
    return card_page("Fine-tuned parameters", verdict(result), facts, lines, values, result["command"])
