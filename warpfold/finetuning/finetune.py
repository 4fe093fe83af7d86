"""Fine-tune a model on the user's structures: pack, split, train, fold the test set before and after, report.

    OUT/alignments/          the alignments of --search
    OUT/store/               the packed structures; pack.tsv has the outcome for each
    OUT/split.toml           the training, validation and test sets
    OUT/run/                 the training run (docs/howto/train.md)
    OUT/params.safetensors   the best parameters by validation
    OUT/before/, OUT/after/  predictions of the test set (docs/reference/outputs.md)
    OUT/report.html          the comparison, with confidence intervals
    OUT/card.md              a model card with data, settings, hardware and command
    OUT/summary.json         the results for programs

Each stage is complete before the next begins, so the same command continues a stopped run.
"""

import hashlib
import json
import logging
import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from warpfold import __version__, settings
from warpfold.data.load.order import Source, joined_clusters, split_keys
from warpfold.data.load.relatives import families, related_entries
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import pack
from warpfold.data.search import search as searching
from warpfold.data.search.database import Database
from warpfold.data.similar.relatives import MIN_IDENTITY
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import read_assembly
from warpfold.device import cores
from warpfold.errors import UserError, listed
from warpfold.evaluation.before_after import DOCKQ, INTERFACE_LDDT, LDDT, Measure, Measured, fold_before_after
from warpfold.files import checksum, claim_folder, file_name, put_aside, sha256, write_atomically, write_summary
from warpfold.finetuning.choose import chosen_settings, first_settings, planned
from warpfold.finetuning.page import (
    comparison_sections,
    counted,
    folded_with,
    report_page,
    stated_relatives,
    unaligned_warning,
    verdict,
)
from warpfold.finetuning.split import Split, make_split, read_split, without_relatives
from warpfold.model.alphafold import AlphaFold
from warpfold.model.weights.files import load_config, load_model
from warpfold.prediction.outputs import remove_drafts, write_prediction
from warpfold.prediction.predictor import Predictor, load
from warpfold.progress import Progress, as_time, no_progress
from warpfold.report.report import write_report
from warpfold.scoring.intervals import paired_difference
from warpfold.training.card import run_card
from warpfold.training.config import RunConfig, load_settings
from warpfold.training.examples import hold_out
from warpfold.training.first_weights import start_from
from warpfold.training.processes import train_here

FORMAT = "warpfold-finetune-1"
PARTS = ("alignments", "sequences", "store", "run", "before", "after", "split.toml", "params.safetensors", "card.md")
# The largest number of entries of the rehearsed store with which forgetting is measured.
GENERAL = 24
ALL_ATOMS = Measure("lddt", "lDDT, all atoms", lambda _, score: score.lddt if score.lddt is not None else math.nan)
TM = Measure("tm", "TM-score", lambda _, score: score.tm)
GDT = Measure("gdt_ts", "GDT-TS", lambda _, score: score.gdt_ts)
CHAIN = (LDDT, ALL_ATOMS, TM, GDT)
COMPLEX = (*CHAIN, INTERFACE_LDDT, DOCKQ)

log = logging.getLogger("warpfold")
# The command line prints what this logger gets; it prints only warnings of `log`.
plan_log = logging.getLogger("warpfold.plan")


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """The options of a fine-tuning run, as documented by `warpfold finetune --help`."""

    structures: Sequence[Path]
    init: Path
    msas: Sequence[Path] = ()
    search: Sequence[str] = ()
    rehearse: Source | None = None
    split: Path | None = None
    one_family: bool = False
    split_identity: float = MIN_IDENTITY
    trainable: Sequence[str] = ()
    adapters: int = 0
    steps: int | None = None
    changes: Sequence[str] = ()
    seed: int = 0
    workers: int = 1
    processes: int = 1
    memory: int | None = None

    def identity(self) -> str:
        """Compute a digest of all inputs that affect the result."""
        rehearsed = self.rehearse and [str(self.rehearse.store.path), self.rehearse.weight]
        inputs = [[str(path) for path in paths] for paths in (self.structures, self.msas)]
        split = self.split and checksum(self.split)
        decides = [*inputs, list(self.search), rehearsed, split, self.one_family, self.adapters, self.steps]
        decides += [list(self.trainable), list(self.changes), self.seed, checksum(self.init), __version__]
        decides += [str(self.split_identity)]
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()


def finetune(
    options: FinetuneOptions,
    out: Path,
    *,
    force: bool = False,
    device: torch.device | str = "cpu",
    command: str = "",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Fine-tune into the folder `out`, or continue the run there, and return the content of `out/summary.json`.

    force: replace an earlier run with other options.
    command: the command line for the model card.
    Errors: UserError for unusable input, too few structures or clusters, settings that match nothing, and if `out`
    holds other files; KeyboardInterrupt if a signal stops training.
    """
    seconds, device, tell = dict[str, float](), torch.device(device), progress or no_progress
    if options.split is not None and options.one_family:
        raise UserError("--one-family draws a split, and --split gives one; leave one of them out")
    assemblies = load_config(options.init).multimer is not None
    first = first_settings(options.init)
    # Invalid changes are reported before the structures are packed.
    load_settings(first, options.changes).config()
    run = options.identity()
    # Until training starts, a command with other options may use the folder: the first command may have been a mistake.
    earlier = claim_folder(out, FORMAT, run, force or not (out / "run").exists())
    if earlier is not None and (force or earlier.get("run") != run):
        put_aside(out, PARTS)
    write_summary(out, {"format": FORMAT, "run": run, "status": "running"})

    began = time.perf_counter()
    msas = [*options.msas, *([_searched(options, out, tell)] if options.search else [])]
    seconds["searching"] = time.perf_counter() - began
    began = time.perf_counter()
    packing = PackOptions(assemblies=assemblies)
    # Clusters of whole chains are similar at 40 % identity; a larger identity of the split divides them, too.
    packing = replace(packing, cluster_identity=max(packing.cluster_identity, options.split_identity))
    packed = pack(options.structures, msas, out / "store", packing, workers=options.workers, progress=tell)
    store = Store(out / "store")
    if msas and not any(entry.alignments for entry in packed.chains):
        note = listed(list(dict.fromkeys(packed.unused.values())), 2) or "no alignment was found"
        raise UserError(
            f"{listed(list(map(str, msas)), 2)}: no alignment has the sequence of one of the structures ({note}); name "
            "the folder of theirs, or leave --msas out to train without"
        )
    limit, left_out = options.split_identity, dict[str, int]()
    if packed.dropped:
        dropped = counted(len(packed.dropped), "chain")
        plan_log.info("%s", f"{dropped} dropped, with the reasons in {out / 'store' / 'pack.json'}")
    unaligned = [entry.name for entry in packed.chains if entry.depth <= 1]
    if unaligned:
        log.warning("%s", unaligned_warning(unaligned, len(packed.chains)))
    if options.split is not None:
        read = read_split(options.split, store, assemblies)
        split = without_relatives(read, store, limit)
        left_out |= {name: len(part) - len(split.parts[name]) for name, part in read.parts.items()}
    else:
        split = make_split(store, options.seed, assemblies, "chain" if options.one_family else "cluster", limit)
    split.write(out / "split.toml")
    seconds["packing"] = time.perf_counter() - began

    began = time.perf_counter()
    general, forgotten, left_out["rehearsal"] = _rehearsal(options, assemblies, store, split)
    for name, count in left_out.items():
        if count:
            plan_log.info("%s", f"{count:,} {name} entries left out: related to tests or validations, at {limit:.0%}")
    values = chosen_settings(first, split, options.steps, options.trainable, options.adapters)
    values["train"] |= {"seed": options.seed, "test": [*split.test, *forgotten]}
    config, plan_summary = planned(values, options.changes, out / "run", device, options.memory)
    parts, optim = ", ".join(f"{len(keys)} {name}" for name, keys in split.parts.items()), config.optim
    steps = f"{config.train.steps} steps of {counted(optim.accumulate, 'example')}, crop {config.data.crop}"
    rate = f"learning rate {optim.learning_rate:g}"
    plan_log.info("%s", f"{parts} (by {split.by}); {steps}, {rate}" + (f"; {plan_summary}" if plan_summary else ""))
    used = [key for part in split.parts.values() for key in part]
    sources = [Source(store, used, 1.0 - (general.weight if general else 0.0))]
    sources += [general] if general is not None else []

    watch = TrainingLine(config.train.steps, tell)
    ranks = min(options.processes, config.optim.accumulate)
    shared = replace(config, plan=replace(config.plan, data=ranks))
    summary = train_here(ranks, shared, sources, out / "run", init=options.init, device=str(device), watch=watch)
    if not summary.finished:
        raise KeyboardInterrupt
    write_atomically(out / "params.safetensors", (out / "run" / "params_best.safetensors").read_bytes())
    seconds["training"] = time.perf_counter() - began

    began = time.perf_counter()
    entries, measured = list[dict[str, Any]](), dict[str, list[Measured]]()
    before, after = both_models(options.init, out / "params.safetensors", config, device)
    clusters = {"test": distinct_entries(store, split.test, limit, split.by)}
    folded = {"test": store}
    if forgotten:
        assert general is not None
        clusters["general"] = distinct_entries(general.store, forgotten, limit)
        folded["general"] = general.store
    for kind, source_store in folded.items():
        keys = list(clusters[kind])
        remove_drafts(out / folder / file_name(key) for folder in ("before", "after") for key in keys)
        measured[kind] = []
        for measurement in fold_before_after(source_store, keys, before, after, options.seed):
            for folder, prediction in zip(("before", "after"), measurement.predictions):
                entries.append(write_prediction(prediction, out / folder))
            measured[kind].append(measurement)
            tell(len(measured[kind]), len(keys), f"folding, before and after: {kind}")
    seconds["folding"] = time.perf_counter() - began
    measures = COMPLEX if assemblies else CHAIN
    logged = map(json.loads, (out / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    result = {
        "format": FORMAT,
        "run": run,
        "status": "complete",
        "seed": options.seed,
        "init": {"file": options.init.name, "sha256": sha256(options.init)},
        "params": {"file": "params.safetensors", "sha256": sha256(out / "params.safetensors"), "step": summary.best},
        "entries": {name: len(part) for name, part in split.parts.items()},
        "split_by": split.by,
        "tested": list(clusters["test"]),
        "folded": {
            "recycles": after.model.config.recycles,
            "ensemble": after.model.config.ensemble,
            "max_msa": after.sample.max_msa,
            "max_extra": after.sample.max_extra,
            "max_templates": after.sample.max_templates,
            "seed": options.seed,
            "equal_weights": before is after,
        },
        "split_identity": limit,
        "left_out": {name: count for name, count in left_out.items() if count},
        "dropped": {chain.name or chain.file: chain.reason for chain in packed.dropped},
        "steps": summary.steps,
        # Why the run ended before its last step; None if it did not.
        "ended": next((row["reason"] for row in logged if row["kind"] == "end"), None),
        "without_alignment": unaligned,
        "chains": len(packed.chains),
        "settings": settings.to_dict(config),
        "compared": {
            kind: compared_scores(measurements, measures, clusters[kind]) for kind, measurements in measured.items()
        },
        "predictions": entries[1 : 2 * len(measured["test"]) : 2],  # after, of the test
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "command": command,
        "machine": {"device": str(device), "threads": torch.get_num_threads(), "system": platform.platform()},
        "versions": {"warpfold": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    page = report_page(out, result, measured, measures)
    write_report(out / "report.html", page)
    trained_on, held_out = hold_out(sources, config)
    text = run_card(
        out / "run",
        settings.to_dict(config),
        trained_on,
        held_out=len(held_out),
        init=options.init,
        device=device,
        ranks=ranks,
        command=command,
        best=summary.best,
        title="Fine-tuned parameters",
        verdict=verdict(result) + stated_relatives(result),
        parameters=[out / "params.safetensors"],
        facts=[
            ("entries", parts),
            ("split", f"by {split.by}, in `split.toml`; related entries left out: {sum(left_out.values()):,}"),
            ("tested", f"{len(clusters['test'])} entries, one of each distinct sequence; {folded_with(result)}"),
            ("what was trained", ", ".join(config.finetune.trainable) or "adapters alone"),
        ],
        sections=comparison_sections(result),
    )
    write_atomically(out / "card.md", text)
    return write_summary(out, result)


class TrainingLine:
    """Report a training run as one line of text: loss, speed and remaining time, or the last validation.

    Without a terminal, `progress_bar` prints every new text.  The text therefore changes only at validations and every
    `every` seconds.
    """

    def __init__(self, steps: int, tell: Progress, every: float = 30.0) -> None:
        self.steps, self.tell, self.every = steps, tell, every
        self.text, self.since = "training", -math.inf  # when the text changed
        # The first step of this session, and the time when it ended.
        self.first: tuple[int, float] | None = None

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Report a row of metrics.jsonl."""
        now, step = time.monotonic(), row["step"]
        if row["kind"] == "step":
            self.first = self.first or (step, now)
            if now - self.since >= self.every:
                rate = row["samples_per_second"]
                speed = f"{rate:.3g} samples/s" if rate >= 1 else f"{1 / rate:.3g} s/sample"
                self.text, self.since = f"training: loss {row['loss']:.3f}, {speed}{self._eta(step, now)}", now
        elif row["kind"] == "validation":
            self.text, self.since = f"training: validation lDDT-Cα {row['lddt_ca']:.3f}{self._eta(step, now)}", now
        self.tell(step, self.steps, self.text)

    def _eta(self, step: int, now: float) -> str:
        """Format the remaining time at the speed of this session, including validations."""
        if self.first is None or step <= self.first[0]:
            return ""
        return f", ETA {as_time((now - self.first[1]) / (step - self.first[0]) * (self.steps - step))}"


def both_models(init: Path, params: Path, config: RunConfig, device: torch.device | str) -> tuple[Predictor, Predictor]:
    """Load the models before and after training, which differ only in their weights.

    Each parameter file has its own settings, such as sampling and recycles.  Both models use those of `params`, so that
    different settings cannot be mistaken for an effect of training.
    If the weights are equal, both are the same object.
    """
    after = load(params, device)
    # Heads that `init` lacks are initialised as in training.
    torch.manual_seed(config.train.seed)
    model = AlphaFold(after.model.config)
    start_from(model, load_model(init), str(init), config.train.new_heads)
    first, last = model.state_dict(), after.model.state_dict()
    if all(torch.equal(first[name], value.cpu()) for name, value in last.items()):
        return after, after
    return Predictor(model, device, sample=after.sample), after


def distinct_entries(
    store: Store, keys: Sequence[str], min_identity: float = MIN_IDENTITY, by: str = "cluster"
) -> dict[str, str]:
    """Select the first entry of each distinct set of sequences.  Returns entry -> name of its cluster.

    Clusters with related chains (data/similar/relatives.py, at `min_identity`) count as one, as in `make_split`.
    by: the unit of the split.  A test set that was split by "chain" is one family, in which each entry is a cluster.
    """
    first: dict[tuple[str, ...], str] = {}
    for key in keys:
        first.setdefault(tuple(sorted(chain.sequence for chain in read_assembly(store, key).chains)), key)
    if by == "chain":
        return {key: key for key in first.values()}
    source = Source(store, list(first.values()))
    return dict(zip(source.keys, families(source, joined_clusters(source), min_identity)))


def compared_scores(
    measured: Sequence[Measured], measures: Sequence[Measure], clusters: Mapping[str, str]
) -> dict[str, Any]:
    """Compute each measure's means before and after training, and their `paired_difference` over clusters.

    clusters: the cluster of each measured entry, in the same order.  A measure excludes entries without a value, such
    as DockQ of a single chain.
    """
    comparisons = {}
    for measure in measures:
        scores = zip(map(measure.of, measured), clusters.values(), strict=True)
        if values := [(*pair, cluster) for pair, cluster in scores if not any(map(math.isnan, pair))]:
            before, after, names = zip(*values)
            difference = paired_difference(after, before, names)
            comparisons[measure.key] = {
                "before": round(difference.means[1], 4),
                "after": round(difference.means[0], 4),
                **{key: value for key, value in difference.to_dict().items() if key != "means"},
            }
    return comparisons


def _searched(options: FinetuneOptions, out: Path, tell: Progress) -> Path:
    """Search for alignments of all distinct sequences of the structures, and return their folder."""
    pack(options.structures, [], out / "sequences", PackOptions(), workers=options.workers, progress=tell)
    store = Store(out / "sequences")
    names: dict[str, str] = {}
    for key in store.keys:
        names.setdefault(read_assembly(store, key).chains[0].sequence, key)
    fasta = out / "sequences.fasta"
    write_atomically(fasta, "".join(f">{name}\n{sequence}\n" for sequence, name in names.items()))
    databases = [Database.parse(text, {}) for text in options.search]
    search_options = searching.SearchOptions(None, options.workers, None, None, None)
    report = searching.search([fasta], databases, out / "alignments", None, None, search_options, tell)
    for failure in report["failures"]:
        log.warning("no alignment of %s: %s", failure["name"], failure["error"])
    return out / "alignments"


def _rehearsal(
    options: FinetuneOptions, assemblies: bool, store: Store, split: Split
) -> tuple[Source | None, list[str], int]:
    """Choose the source to rehearse and the entries of its store that measure forgetting.

    Rehearsal excludes relatives of test, validation and forgetting entries.  Forgetting entries are not related to the
    user's training and validation entries.
    Returns the source, the forgetting entries, and the number of excluded entries.
    """
    if options.rehearse is None:
        return None, [], 0
    general, limit, threads = options.rehearse.store, options.split_identity, cores()
    source = Source(general, assemblies=assemblies)
    held_count = min(GENERAL, max(1, len(source.keys) // 10))
    drawn = split_keys(general, held_count, options.seed, assemblies)[1][:GENERAL]
    trained_entries = [(store, key) for key in (*split.training, *split.validation)]
    related = set(related_entries(Source(general, drawn), trained_entries, limit, threads).tolist())
    forgotten = [key for place, key in enumerate(drawn) if place not in related]
    judging = [*((store, key) for key in (*split.test, *split.validation)), *((general, key) for key in forgotten)]
    places = set(related_entries(source, judging, limit, threads).tolist())
    kept_places = [place for place, key in enumerate(source.keys) if place not in places or key in forgotten]
    if len(kept_places) == len(forgotten):
        raise UserError(
            f"{general.path}: every entry is related to the test or the validation. Leave --rehearse out, or raise "
            "--split-identity"
        )
    rehearsed = Source(general, source.keys.take(np.array(kept_places)), options.rehearse.weight)
    return rehearsed, forgotten, len(source.keys) - len(kept_places)
