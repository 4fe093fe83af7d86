"""Write docs/benchmarks.md from the files of benchmarks/results.

    python docs/site/benchmarks.py           # write the page
    python docs/site/benchmarks.py --check   # exit with 1 if the page differs

Only the standard library is needed.  tests/test_site.py checks that the committed page equals `page()`.
"""

import argparse
import json
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
Report = dict[str, Any]

INTRODUCTION = """\
# Benchmarks

`python docs/site/benchmarks.py` writes this page from the files in `benchmarks/results`. A test checks that they agree.
[benchmarks](../benchmarks/README.md) lists the script that made each file. Compare only numbers of one table: machines,
versions and loads differ between files. Two-core machines are virtual machines that other work may share. Times are
medians unless a table says otherwise.
"""


def latest(pattern: str) -> Path:
    """Return the newest file of benchmarks/results that matches a pattern; file names end with their date."""
    return max(RESULTS.glob(pattern), key=lambda path: (path.stem[-10:], path.name))


def read(path: Path) -> Report:
    report: Report = json.loads(path.read_text(encoding="utf-8"))
    return report


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("|" + "|".join(str(cell).replace("|", "\\|") for cell in line) + "|" for line in lines)


def source(path: Path, machine: str = "", note: str = "") -> str:
    """Describe where a table comes from: file, date and machine."""
    report = read(path) if path.suffix == ".json" else {}
    if not machine:
        name = report.get("machine", "x86_64")
        machine = name.get("device", "") if isinstance(name, Mapping) else str(name)
        if isinstance(name, Mapping):
            report = {**name, **report}
        if (cores := report.get("cores")) and "core" not in machine:
            machine += f", {cores} cores"
        versions = report.get("versions", report)
        machine += f", torch {versions['torch']}" if "torch" in versions else ""
    date = report.get("date", path.stem[-10:])
    link = f"[{path.name}](../benchmarks/results/{path.name})"
    return f"{link}; {date}; {machine}." + (f" {note}" if note else "")


def sentence(text: str) -> str:
    """Make a sentence of a note: a capital letter and a full stop."""
    return text[:1].upper() + text[1:] + "." if text else ""


def number(value: float, digits: int = 3) -> str:
    """Format a number with so many significant digits, without an exponent."""
    if value == 0:
        return "0"
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if abs(float(text)) >= 100 else f"{float(text):g}"


def accuracy() -> str:
    path = latest("real-files-*.json")
    rows = [(row["what"], row["result"]) for row in read(path)["rows"]]
    return (
        source(path, note="These runs test the path from real files to scores. They do not show AlphaFold2's accuracy.")
        + "\n\n"
        + table(("run", "result"), rows)
    )  # fmt: skip


def precision() -> str:
    path = latest("precision-*.json")
    report = read(path)
    rows = []
    for name, part in report["parts"].items():
        for key, unit in (("mean_plddt", "mean pLDDT (of 100)"), ("lddt_ca", "lDDT-Cα")):
            value = part[key]
            effects = number(value["effect_of_bf16"]), number(value["effect_of_seeds"])
            rows.append((f"{name}: {unit}", *effects, value["bf16_changes_less"]))
    note = (
        f"Mean absolute differences of {report['seeds']} seeds: between bf16 and fp32 with one seed, "
        "and between two seeds in fp32. "
        "Published parameters, 48 blocks and GPU kernels were not part of this."
    )  # fmt: skip
    columns = ("model and proteins", "bf16 against fp32", "seed against seed", "proteins where bf16 changes less")
    return source(path, note=note) + "\n\n" + table(columns, rows)


def gpu() -> str:
    path = latest("gpu-*.json")
    report = read(path)
    machine = report["machine"]
    name = (
        f"{machine['device']}, torch {machine['torch']}, Triton {machine['triton']}, launch table {machine['launches']}"
    )
    seconds = {(row["way"], row["pass"]): row["ms"] for row in report["block"]}
    passes = ("forward", "backward", "both")
    block = [
        (
            way.replace("ours", "WarpFold"),
            *(number(seconds[way, each]) if (way, each) in seconds else "" for each in passes),
        )
        for way in dict.fromkeys(row["way"] for row in report["block"])
    ]
    steps = [
        (
            row["what"],
            row.get("plan", "one device, graphs, everything saved, bf16"),
            number(row["ms"]),
            number(row["peak_mib"] / 1024),
        )
        for row in report["step"]
    ]
    folds = [
        (row["what"], row["way"], number(row["seconds"]), number(row["peak_mib"] / 1024)) for row in report["fold"]
    ]
    doctor = report["doctor"]
    return "\n\n".join(
        (
            source(
                path, name, "The launch table was not tuned on this GPU. Later changes of the kernels are not included."
            ),
            "An Evoformer block of AlphaFold2's widths, 128 sequences, 256 residues, bf16, milliseconds:",
            table(("implementation", *passes), block),
            "Training steps:",
            table(("step", "plan", "ms", "peak memory, GiB"), steps),
            "Passes of a prediction:",
            table(("pass", "plan", "s", "peak memory, GiB"), folds),
            f"`doctor --kernels`: {doctor['ok']} of {doctor['checks']} checks passed ({doctor['note']}). "
            f"GPU tests: {report['gpu_tests']['first run']}.",
        )
    )


def plan_name(plan: Mapping[str, Any]) -> str:
    """Describe a plan of the block benchmark, or JAX's."""
    if "jax" in plan:
        return f"JAX {plan['jax']}" + (f", sub-batches of {plan['subbatch']}" if plan["subbatch"] else "")
    kernels = "" if plan["kernels"] == "fast" else f", {plan['kernels']}"
    chunk = f", slices of {plan['chunk']}" if plan.get("chunk") else ""
    return f"WarpFold, {plan['precision']}{kernels}{chunk}" + (", in place" if plan.get("in_place") else "")


def block() -> str:
    path = latest("block-2core-*.json")
    report = read(path)
    rounds: dict[tuple[str, str], list[Report]] = {}
    for row in report["results"]:
        rounds.setdefault((plan_name(row["plan"]), row["pass"]), []).append(row)
    rows = [
        (*name, " to ".join(dict.fromkeys(number(edge(row["seconds"] for row in group)) for edge in (min, max))),
         number(max(row["peak_mib"] for row in group), 4))
        for name, group in rounds.items()
    ]  # fmt: skip
    note = sentence(report["what"]) + " " + sentence(report.get("note", ""))
    return source(path, note=note) + "\n\n" + table(("implementation", "pass", "s", "peak memory, MiB"), rows)


def adapters() -> str:
    sections = []
    for pattern in ("adapters-esmfold-*.json", "adapters-boltz-*.json", "adapters-openfold3-*.json"):
        path = latest(pattern)
        report = read(path)
        rows = [
            (
                row["n"],
                number(row["theirs"]["forward"]),
                row["times as fast"]["forward"],
                number(row["theirs"]["both"]),
                row["times as fast"]["both"],
                row["peak, ours of theirs"],
            )
            for row in report["results"]
        ]
        columns = (
            "residues", "theirs, forward, s", "times as fast, forward",
            "theirs, both passes, s", "times as fast, both", "peak memory, share of theirs",
        )  # fmt: skip
        sections += [
            source(path, note=sentence(report["what"]) + " " + sentence(report.get("note", ""))),
            table(columns, rows),
        ]
    return "\n\n".join(sections)


def finetuning() -> str:
    sections = []
    names = sorted(RESULTS.glob("finetuning*.json"))
    for path in names:
        report = read(path)
        about = report["about"]
        rows = []
        for way in report["ways"]:
            score = way["compared"]["lddt_ca"]
            low, high = score["interval"]
            change = f"{score['difference']:+.3f} ({low:+.3f} to {high:+.3f})"
            rows.append((way["way"], way["steps"], number(way["seconds_of_a_step"]), f"{score['before']:.3f}", change))
        columns = ("trained part", "steps", "s a step", "lDDT-Cα before", "change, 95 % interval")
        data = about["data"].partition(" (../shared")[0]
        machine = f"{about['machine']}, torch {about['torch']}"
        link = f"[{path.name}](../benchmarks/results/{path.name}); {about['date']}; {machine}. {data}."
        sections += [link, table(columns, rows)]
    return "\n\n".join(sections)


def design() -> str:
    path = latest("design-*.json")
    rows = []
    for name, problem in read(path)["problems"].items():
        for model in ("designer", "another"):
            for key, value in problem[model].items():
                rows.append((name, model, key, number(value["designed"]), number(value["random"]), value["better"]))
    columns = (
        "problem",
        "judged by",
        "score, lower is better",
        "designed",
        "random sequences",
        "designs that are better",
    )
    note = "Toy models; `another` is a model that was trained from another seed and did not take part in the design."
    text = source(path, note=note) + "\n\n" + table(columns, rows)
    path = latest("distill-*.json")
    report = read(path)
    scores = [(name, f"{value:.3f}") for name, value in report["lddt_ca"].items()]
    note = f"Distillation, lDDT-Cα of {report['proteins']['held out']} held-out proteins. " + source(path)
    return "\n\n".join((text, note, table(("model", "lDDT-Cα"), scores)))


def throughput() -> str:
    path = latest("proteome-*.json")
    report = read(path)
    waiting = report["processes"][0]["waiting"]
    rows = [
        ("generated proteins", report["proteins"]),
        ("residues", report["residues"]),
        ("seconds", number(report["seconds"])),
        ("seconds until the first result", number(report["first_result_seconds"])),
        ("proteins that shared a pass", report["shared_a_pass"]),
        ("share of the time that the model waited", waiting),
    ]
    sections = [source(path), table(("a proteome with a narrow `tiny`", ""), rows)]
    paths = sorted(RESULTS.glob("designs-*.json"))
    keys = (
        ("designs", "designs"), ("residues", "residues"), ("model, ms of CPU each", "model_cpu_ms"),
        ("scores, ms of CPU each", "scores_cpu_ms"), ("all other work, ms of CPU each", "beside_cpu_ms"),
        ("peak memory, MiB", "peak_mib_with_the_end"),
    )  # fmt: skip
    reports = [read(path) for path in paths]
    rows = [(name, *(report[key] for report in reports)) for name, key in keys]
    sections += ["`predict --keep best:10`. " + " ".join(source(path) for path in paths)]
    return "\n\n".join([*sections, table(("", *(f"{report['designs']} designs" for report in reports)), rows)])


def features() -> str:
    path = latest("features-*.json")
    rows = [
        (row["rows"], row["of"], row["samples_per_second"])
        for row in read(path)["results"]
        if row["passes"] == "1 to 4"
    ]
    sections = [
        source(
            path,
            note="Samples a second of one core, from the store to tensors, 1 to 4 MSA samples each. "
            "`exact` follows the paper.",
        ),
        table(("rows", "entries", "samples/s"), rows),
    ]
    path = latest("clustering-*.json")
    rows = [
        (
            row["alignment"].partition("/")[0], row["length"], f"{row['depth']:,}", f"{row['rows']:,.0f}",
            f"{row['rows within the budget']:,.0f}", f"{row['moved']:.0%}",
            f"{row['profile, clusters of the crop']:.2f}", f"{row['profile, row budget']:.2f}",
        )
        for row in read(path)["results"]
        if row["moved"] or row["profile, row budget"] >= 0.01
    ]  # fmt: skip
    columns = (
        "alignment", "residues", "rows", "after block deletion", "within `max_cost = 8`", "rows that change cluster",
        "profile, `clustering = \"crop\"`", "profile, `max_cost`",
    )  # fmt: skip
    note = (
        'Effect of `data.clustering = "crop"` and `data.max_cost`. '
        "The profile columns are total variation distances to the paper's profile. "
        "Alignments without an effect are left out."
    )
    return "\n\n".join([*sections, source(path, note=note), table(columns, rows)])


def loading() -> str:
    path = latest("feeding-2core-2*.json")
    rows = [
        (
            row["storage"] + (f" ({row['emulated']}, emulated)" if row["emulated"] else ""),
            number(row["feeding"]["storage, ms"]["mean"]),
            number(row["feeding"]["features, ms"]["mean"]),
            number(row["feeding"]["examples per second"], 4),
            row["feeding"]["limit"],
            *(row[key]["waiting"] for key in ("8 ranks, 16 processes", "steps of 1.3", "steps of 0.7")),
        )
        for row in read(path)["rows"]
    ]
    columns = (
        "storage", "storage, ms", "features, ms", "examples/s from 16 cores", "limit",
        "waiting: 8 ranks", "steps of 1.3 times the need", "of 0.7 times (0.3 expected)",
    )  # fmt: skip
    sections = [source(path, note="Share of the time that steps wait for examples."), table(columns, rows)]
    path = latest("straggler-*.json")
    rows = [
        (8 * case["case"]["ahead"], *(case["results"][key]["against_without"] for key in ("window", "in order")))
        for case in read(path)["straggler"]
    ]
    sections += [
        source(
            path,
            note="Time of a step relative to a run without slow examples; 8 simulated ranks, "
            "5 % of the examples ten times as slow.",
        ),
        table(("examples made ahead per rank", "window of 32", "in order"), rows),
    ]
    path = latest("ready-*.json")
    rows = [
        (name, number(case["ready_ms"]), case["dataloader_over_ready"], case["endless_over_ready"])
        for name, case in read(path)["cases"].items()
    ]
    columns = ("examples", "`Ready`, ms", "`DataLoader` per epoch / `Ready`", "endless `DataLoader` / `Ready`")
    note = "Time of torch's `DataLoader` over that of `Ready`; above 1, `Ready` is faster."
    return "\n\n".join([*sections, source(path, note=note), table(columns, rows)])


def stores() -> str:
    path = latest("million-*.json")
    rows = [
        (
            f"{row['entries']:,}", row["merge"]["index, MB"], row["open"]["worker"], row["order"]["epoch"],
            row["order"]["weights"], row["order"]["held out"], row["order"]["costs"],
        )
        for row in read(path)["results"]
    ]  # fmt: skip
    columns = ("entries", "index, MB", "open, s", "order of an epoch, s", "weights, s", "held-out set, s", "costs, s")
    sections = [source(path), table(columns, rows)]
    path = latest("similar-*.json")
    rows = [
        (row["by"], f"{row['sequences']:,}", row["seconds"], f"{row['clusters']:,}", row["peak, MB"])
        for row in read(path)["results"]
    ]
    columns = ("clustered by", "sequences", "CPU seconds", "clusters", "peak memory, MB")
    return "\n\n".join([*sections, source(path), table(columns, rows)])


def compression() -> str:
    path = latest("compression-*.json")
    settings = read(path)["results"]
    columns = [f"{setting}, {model}" for setting, models in settings.items() for model in models]
    rows = {}
    for setting, models in settings.items():
        for model, ways in models.items():
            for way, value in ways.items():
                rows.setdefault(way, {})[f"{setting}, {model}"] = number(value["speed"])
    gone = {"ours, bf16", "ours, powersgd", "ours, topk", "ours, hierarchical", "ours, hierarchical, bf16"}
    cells = [
        (way.replace("ours", "WarpFold"), *(values.get(column, "") for column in columns))
        for way, values in rows.items()
        if way not in gone  # the hook has int8 and 1bit alone
    ]
    note = "Speed of a training step relative to DDP without a hook; two nodes emulated on one machine."
    return source(path, note=note) + "\n\n" + table(("hook", *columns), cells)


def collectives() -> str:
    path = latest("overlap-*.json")
    rows = [
        (
            {"middle": "AlphaFold2's", "first": "Multimer's"}.get(row["outer"], row["outer"]),
            ", ".join(f"{key} {value}" for key, value in row["plan"].items()),
            *(
                f"{row['passes'][each]['with_work_left']} of {row['passes'][each]['waits']}"
                for each in ("forward", "backward")
            ),
        )
        for row in read(path)["results"]
        if not row["awaited_where_it_begins"]
    ]
    sections = [
        source(path, note="Waits with work left, of all waits of two Evoformer blocks on all ranks."),
        table(("order", "plan", "forward", "backward"), rows),
    ]
    path = latest("communication-*.json")
    report = read(path)
    rows = [
        (
            row["residues"],
            row["axial"],
            *(number(row[way][each]["mb"]) for way in ("gather", "channels") for each in ("forward", "backward")),
        )
        for row in report["sums"]
        if row["axial"] in (2, 8, 64) and "gather" in row and row["residues"] != 384
    ]
    columns = (
        "residues",
        "axial ranks",
        "gather, forward",
        "gather, backward",
        "channels, forward",
        "channels, backward",
    )
    sections += [
        source(path, "counted on fake ranks", "MB that a rank sends in an Evoformer block, 128 sequences, bf16."),
        table(columns, rows),
    ]
    rows = [
        (name.removeprefix("memory, "), row["axial"], number(row["peak_mb"], 4), number(row["of_one_rank"]))
        for name, entries in report.items()
        if name.startswith("memory, ")
        for row in entries
        if row["axial"] in (1, 2, 8) and name != "memory, folding, 512 residues"
    ]
    sections += [
        "Peak memory of the first rank (counted, bf16):",
        table(("job", "axial ranks", "MB", "share of one rank"), rows),
    ]
    path = latest("far-*.json")
    rows = [
        (f"{row['residues']:,}", row["ranks"], row["peak_gb"], number(row["seconds_of_a_pass_modelled"]))
        for row in read(path)["rows"]
    ]
    columns = ("residues", "ranks", "peak memory of the trunk, GB (counted)", "s a pass (modelled)")
    note = "Folding in place, bf16, 512 + 1,024 sequences; modelled from H100 data sheets, NVLink between all devices."
    return "\n\n".join([*sections, source(path, "counted and modelled", note), table(columns, rows)])


def gradients() -> str:
    path = latest("cluster-*.json")
    report = read(path)
    links = list(report["results"])
    rows = {}
    for link, result in report["results"].items():
        for name, value in result["gradients"].items():
            if name.startswith("alone: "):
                rows.setdefault(name.removeprefix("alone: "), {})[link] = value["against_plain"]
    cells = [(name, *(values.get(link, "") for link in links)) for name, values in rows.items()]
    plain = ", ".join(f"{link} {report['results'][link]['gradients']['alone: plain']['seconds']:.2f}" for link in links)
    note = (
        f"{report['what']}. Time of an exchange without computation, relative to `plain`, whose seconds are: {plain}."
    )
    return source(path, note=note) + "\n\n" + table(("strategy", *links), cells)


def estimates() -> str:
    path = latest("step-times-published-*.json")
    report = read(path)
    rows = []
    for row in report["rows"]:
        unit = row["unit"]
        verdict = (
            "fitted" if row["calibrated"] else f"{100 * row['off']:+.1f} %" + ("" if row["within"] else ", **missed**")
        )
        rows.append(
            (
                row["source"],
                row["what"],
                f"{number(row['measured'])} {unit}",
                f"{number(row['estimated'])} {unit}",
                verdict,
            )
        )
    sections = [
        source(
            path,
            "estimates modelled from data sheets",
            "Published step times against the planner's estimates. "
            "Two shares of the roofline are fitted to each code base.",
        ),
        table(("system", "quantity", "measured", "estimated", "error"), rows),
        f"{report['within']} of the {report['predicted']} predictions are within {100 * report['bar']:.0f} %. "
        "Some rows repeat an estimate against another measurement.",
    ]
    path = latest("step-times-measured-*.json")
    report = read(path)
    rows = [
        (row["name"], f"{row['measured']:.2f}", f"{row['estimated']['seconds']:.2f}", f"{100 * row['off']:+.0f} %")
        for row in report["rows"]
    ]
    within = sum(row["within"] for row in report["rows"])
    sections += [
        source(path, note=f"{report['what']}. Ranks share two cores."),
        table(("plan and link", "measured, s", "estimated, s", "error"), rows),
        f"{within} of the {len(rows)} cases are within {100 * report['bar']:.0f} %.",
    ]
    path = latest("plans-*.json")
    ratios = {name: case["chosen_over_best"] for name, case in read(path)["cases"].items()}
    worst = max(ratios, key=lambda name: ratios[name])
    verdict = (
        f"The plan that the planner chose took at most {ratios[worst]:.2f} times the time of the fastest plan "
        f"in {len(ratios)} cases (the worst: {worst}). "
    )
    return "\n\n".join([*sections, verdict + source(path)])


def length() -> str:
    path = latest("length-*.json")
    report = read(path)
    gib = 2**30
    rows = [
        (
            {"blocks": "two blocks", "whole": "a narrow model"}[row["model"]], row["plan"], f"{row['residues']:,}",
            number(row["seconds"]), number(row["planned_seconds"]),
            number(row["peak_bytes"] / gib), number(row["planned_bytes"] / gib),
        )
        for row in report["results"]
        if row["model"] == "blocks" or row["residues"] >= 1024
    ]  # fmt: skip
    columns = ("model", "plan", "residues", "s", "estimated, s", "peak of the process, GiB", "estimated tensors, GiB")
    sections = [
        f"![Time and memory against length, measured and estimated](../benchmarks/results/{path.stem}.svg)",
        source(path, note=report["what"] + "."),
        table(columns, rows),
    ]
    path = latest("memory-*.json")
    ratios = [case["ratio"] for case in read(path)["cases"]]
    sections += [
        f"Estimated over allocated memory of tensors in {len(ratios)} cases "
        "(monomer, multimer, `tiny`; predictions and training): "
        f"{min(ratios):.4f} to {max(ratios):.4f}. " + source(path)
    ]
    return "\n\n".join(sections)


def faults() -> str:
    reasons = tomllib.loads((RESULTS / "mutation-equivalent.toml").read_text(encoding="utf-8"))
    rows = []
    for path in sorted(RESULTS.glob("mutation-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        outcomes: Counter[str] = Counter()
        for fault in {line["name"]: line for line in lines if "name" in line}.values():
            reason = reasons.get(fault["name"], {})
            is_excused = fault["outcome"] != "killed" and bool(reason)
            outcomes["without effect" if is_excused else fault["outcome"]] += 1
        effective = outcomes.total() - outcomes["without effect"]
        link = f"[{path.name}](../benchmarks/results/{path.name})"
        found = outcomes["killed"]
        counts = outcomes.total(), outcomes["without effect"], found, effective - found
        rows.append((link, *counts, f"{100 * found / effective:.1f} %"))
    columns = ("planted faults", "planted", "no effect on a CPU", "found", "not found", "share found")
    sections = [
        table(columns, rows),
        "Tests were added after seeds 0, 1, 2 and 11. Seed 0 was planted again, so its share describes its faults "
        "alone. Seed 1 drew from all packages, seeds 2, 11 and 13 from `data`, `scoring`, `evaluation`, "
        "`finetuning`, `prediction` and `sequence_design`. A test that shares a fixture finds the last fault of seed "
        "13.",
    ]
    path = latest("reliability-kills-*.json")
    rows = [
        (run["seed"], run["kills"], run["cycles"], run["equal"], run["with_files_left_over"])
        for run in read(path)["runs"]
    ]
    columns = ("seed", "kills", "runs", "runs equal to an undisturbed one", "runs that left drafts")
    sections += [
        source(path, note="The causes found with seeds 0 and 1 were repaired before seed 2."),
        table(columns, rows),
    ]
    path = latest("reliability-disk-*.json")
    report = read(path)
    ended = sum(count for command in report["by_command"].values() for count in command["ended_with_an_error"].values())
    sections += [
        source(path)
        + f" Failing disks, folders and clocks: {report['tried']:,} cases, {ended:,} of them ended with one line; "
        f"{report['trouble']} left anything incomplete or different afterwards."
    ]
    return "\n\n".join(sections)


SECTIONS: dict[str, Callable[[], str]] = {
    "GPU": gpu,
    "Accuracy": accuracy,
    "Precision": precision,
    "An Evoformer block on a CPU": block,
    "Accelerated models": adapters,
    "Fine-tuning": finetuning,
    "Design and distillation": design,
    "Throughput": throughput,
    "Features": features,
    "Data loading": loading,
    "Stores": stores,
    "Length and memory": length,
    "Estimates": estimates,
    "Collectives": collectives,
    "Gradients": gradients,
    "Compressed DDP": compression,
    "Fault injection": faults,
}


def page() -> str:
    """Build the page from all results."""
    return INTRODUCTION + "".join(f"\n## {title}\n\n{section()}\n" for title, section in SECTIONS.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed page, write nothing")
    check = parser.parse_args().check
    text = page()
    if check:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
