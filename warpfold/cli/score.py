"""`warpfold score`, `warpfold golden` and `warpfold evaluate`: compare with a reference."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import warpfold
from warpfold import arguments
from warpfold.arguments import (
    Cluster,
    PathLike,
    Paths,
    Seed,
    Shard,
    Workers,
    argument,
    checked,
    progress_of,
    reads,
    writes,
)
from warpfold.bulk import JobPart
from warpfold.cli.common import Answer, command, table, warn
from warpfold.errors import UserError, listed
from warpfold.progress import Progress, progress_bar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from tests.golden.run import CaseResult
    from warpfold.prediction.outputs import Prediction
    from warpfold.scoring.score import Score


@checked()
def score(
    predicted: Annotated["PathLike | Prediction", argument("mmCIF or PDB file.", shell=Path)],
    reference: Annotated["PathLike | Prediction", argument("mmCIF or PDB file: the truth.", shell=Path)],
    *,
    chains: Annotated[
        str | Mapping[str, str] | None,
        reads(
            "Pairs, predicted:reference, e.g. A:B,B:C; or two partners, e.g. A:HL. Default: by sequence.",
            shell=str | None,
        ),
    ] = None,
    assembly: Annotated[
        bool, reads("Compare with the first biological assembly of the reference, as predict folds it.")
    ] = False,
    allow_unplaced: Annotated[bool, reads("Score although residues of a file are in none of its chains.")] = False,
) -> "Score":
    """Compare a structure with its reference: lDDT, GDT, TM-score, RMSD, and for complexes DockQ and other scores.

    Either structure may be a `Prediction`, and chains a mapping, predicted -> reference.
    Errors: UserError for files that cannot be read or share no residues.
    """
    from warpfold.scoring import score as scoring

    named_chains = _named_chains(chains)
    predicted_source, reference_source = (
        arguments.path(argument_name, value) if not hasattr(value, "structure") else value.structure()
        for argument_name, value in (("predicted", predicted), ("reference", reference))
    )
    return scoring.score_files(predicted_source, reference_source, named_chains, assembly, allow_unplaced)


def _named_chains(chains: str | Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Parse the user's pairs of chains. Errors: UserError for anything else."""
    pairs = chain_pairs(chains) if isinstance(chains, str) else chains
    if pairs is not None and not isinstance(pairs, Mapping):
        raise UserError(f'chains = {arguments.shown(pairs)}: expected pairs, {{"A": "B"}} or "A:B"')
    return pairs


def chain_pairs(text: str) -> dict[str, str]:
    """Parse "A:B,B:C" to pairs, predicted -> reference. Errors: UserError for anything else."""
    pairs = [pair.split(":") for pair in text.split(",")]
    if any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise UserError(f"--chains {text}: expected pairs of predicted:reference, for example A:B,B:C")
    reference_by_predicted = dict(pairs)
    if len(reference_by_predicted) < len(pairs):
        raise UserError(f"--chains {text}: names a predicted chain twice. Name each once.")
    return reference_by_predicted


@command(score, example="Example:  warpfold score predicted.cif 1ubq.cif.gz")
def score_in_shell(given: dict[str, Any]) -> Answer:
    """Compare a structure with its reference: lDDT, GDT, TM-score, RMSD, and for complexes DockQ and other scores."""
    from warpfold.scoring.score_complex import HEADS

    result = score(**given)
    text: list[Any] = [f"{name:18s} {value}" for name, value in result.rows()]
    if result.complex and result.complex.interfaces:
        text += ["", table(HEADS, result.complex.table())]
    return Answer(result.to_dict(), text)


@checked()
def golden(
    folder: Annotated[PathLike, argument("Folder of reference cases.")],
    *,
    only: Annotated[str | None, reads("A pattern for the cases' paths.")] = None,
    progress: Progress | None = None,
) -> "list[CaseResult]":
    """Compare WarpFold with numbers of DeepMind's official code, array by array; in a clone.

    Returns a result for each case.
    Errors: UserError outside a clone, for a folder without cases, and if `only` matches none.
    """
    # The tests of the checkout compute the cases.
    checkout = Path(warpfold.__file__).parents[1]
    if not (checkout / "tests/golden/run.py").is_file():
        raise UserError("golden: the reference cases are tests of a clone of WarpFold (tests/golden). Run it there.")
    sys.path.insert(0, str(checkout))
    from tests.golden.run import run

    return run(Path(folder), only, progress_of(progress))


@command(golden, example="Example:  warpfold golden tests/golden --only units/*")
def golden_in_shell(given: dict[str, Any]) -> Answer:
    """Compare WarpFold with numbers of DeepMind's official code, array by array; in a clone."""
    with progress_bar() as progress:
        cases = golden(**given, progress=progress)
    # `golden` has put the clone on the path of imports.
    from tests.golden.run import PASS, as_data, summary, table

    data = {"cases": as_data(cases), "summary": summary(cases)}
    return Answer(data, [table(cases), summary(cases)], any(case.verdict != PASS for case in cases))


REPORT, PAGE, TABLE = "evaluation.json", "report.html", "targets.csv"


@checked()
def evaluate(
    predictions: Annotated[PathLike, argument("Folder of predicted structures.")],
    truth: Annotated[
        PathLike, argument("Folder of mmCIF or PDB files named by target: NAME, or the entry of NAME_CHAIN.")
    ],
    *,
    chains: Annotated[
        str | Mapping[str, str] | None,
        reads("For each target, as for score: pairs, A:B, or two partners, A:HL.", shell=str | None),
    ] = None,
    against: Annotated[Paths | None, reads("Other folders of predictions, which the first is compared with.")] = None,
    suite: Annotated[PathLike | None, reads("List of targets and hashes of their files, TOML; or cameo2022.")] = None,
    train_sequences: Annotated[
        PathLike | None, reads("What the model was trained on, a FASTA file or a store: for scores by similarity.")
    ] = None,
    assembly: Annotated[bool, reads("Compare with the first biological assembly of each structure.")] = False,
    allow_unplaced: Annotated[bool, reads("Score although residues of a file are in none of its chains.")] = False,
    all_models: Annotated[bool, reads("List all models of a target; the means are of the best ranked.")] = False,
    out: Annotated[PathLike | None, writes("Folder for the page, the table and all numbers.")] = None,
    csv: Annotated[PathLike | None, writes("File for the table of all targets.")] = None,
    write_suite: Annotated[PathLike | None, writes("File for a list of these targets, for --suite.")] = None,
    seed: Seed = 0,
    workers: Workers = 1,
    cluster: Cluster = None,
    shard: Shard = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score folders of predictions against structures: per target and over all, calibration, which set is better.

    The file names identify predictions of WarpFold, AlphaFold, ColabFold, AlphaFold DB, CASP and OpenFold. Other
    predictions are NAME.cif or NAME.pdb.
    Returns the content of `OUT/evaluation.json` (docs/howto/score.md). Targets that could not be scored are listed
    under "failures" of their set. With `shard`, "status" is "running" and the result covers only this job until all
    jobs have finished.
    Errors: UserError for folders that are missing, empty or share no targets, for a suite with different files, if no
    target of the first set could be scored, and if `out` holds other files.
    """
    from warpfold.evaluation import evaluate as evaluating
    from warpfold.evaluation.measure import Comparison
    from warpfold.evaluation.page import evaluation_page
    from warpfold.evaluation.parts import IS_PART
    from warpfold.evaluation.suite import read_suite
    from warpfold.evaluation.tables import table_of
    from warpfold.files import check_new, refuse_foreign, update_file, write_atomically, writing
    from warpfold.report.report import write_report

    folder, table_file, suite_file = (None if path is None else Path(path) for path in (out, csv, write_suite))
    if folder is not None:
        refuse_foreign(folder, lambda name: name in {REPORT, PAGE, TABLE} or IS_PART(name))
    elif shard is not None:
        raise UserError("--shard: needs --out, a folder that all parts share, where the last writes the results")
    part = JobPart.parse(shard) if shard else None
    if suite_file is not None:
        check_new(suite_file)
    targets = None if suite is None else read_suite(Path(suite))
    folders = [Path(predictions), *arguments.paths("against", against)]
    sets, running = evaluating.evaluate(
        folders,
        Path(truth),
        suite=targets,
        train_sequences=arguments.path_or_none("train_sequences", train_sequences),
        all_models=all_models,
        options=Comparison(assembly, _named_chains(chains), allow_unplaced),
        workers=workers,
        cluster=cluster,
        part=part,
        out=folder,
        progress=progress_of(progress),
    )
    if running:
        return running
    report = evaluating.report(sets, Path(truth), targets, seed)
    rows = table_of(evaluating.table_rows(sets))
    if folder is not None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_report(folder / PAGE, evaluation_page(sets, report))
        write_atomically(folder / TABLE, rows)
        write_atomically(folder / REPORT, json.dumps(report, indent=1, allow_nan=False) + "\n")
    if table_file is not None:
        update_file(table_file, rows.encode())
    if suite_file is not None:
        name = f"{sets[0].name} of {Path(truth).resolve().name}"
        write_atomically(suite_file, evaluating.as_suite(sets[0], name))
    return report


@command(
    evaluate,
    example="Example:  warpfold evaluate folded structures --out evaluation\n\nIs one better:  "
    "warpfold evaluate tuned structures --against before --out evaluation\n\nBy a job array of 8:  "
    "warpfold evaluate folded structures --out evaluation --shard $I/8",
)
def evaluate_in_shell(given: dict[str, Any]) -> Answer:
    """Score folders of predictions against structures: per target and over all, calibration, which set is better.

    The file names identify predictions of WarpFold, AlphaFold, ColabFold, AlphaFold DB, CASP and OpenFold. Other
    predictions are NAME.cif or NAME.pdb.
    """
    from warpfold.evaluation.page import warnings_of

    with progress_bar() as progress:
        report = evaluate(**given, progress=progress)
    if report.get("status") == "running":
        for failure in report["failures"]:
            warn(f"failed {failure['target']}: {failure['error']}")
        progress_text = (
            f"part {report['part']}: scored {report['predictions'] - len(report['failures'])} of "
            f"{report['predictions']}"
        )
        return Answer(
            report, [f"{progress_text}; {listed(report['left'])} are not done"], int(bool(report["failures"]))
        )
    for prediction_set in report["sets"]:
        for failure in prediction_set["failures"]:
            warn(f"failed {failure['target']}: {failure['error']}")
    for warning in warnings_of(report["sets"]):
        warn(f"warning: {warning}")
    failed = any(prediction_set["failures"] for prediction_set in report["sets"])
    failed = failed or (
        report["suite"] is not None and any(prediction_set["without_prediction"] for prediction_set in report["sets"])
    )
    return Answer(report, _text(report, given["out"]), int(failed))


def _text(found: dict[str, Any], out: Path | None) -> "Iterator[str | Table]":
    """Yield the lines and tables of the terminal."""
    from warpfold.evaluation.tables import METRICS
    from warpfold.scoring.intervals import MIN_CLUSTERS

    for result in found["sets"]:
        yield f"{result['name']}: {result['layout']}, {result['targets']} targets scored"
        rows = []
        for metric in METRICS:
            if numbers := result["means"].get(metric.key):
                span = (
                    "-"
                    if numbers["interval"] is None
                    else " to ".join(f"{bound:.{metric.digits}f}" for bound in numbers["interval"])
                )
                mean, median = (f"{numbers[key]:.{metric.digits}f}" for key in ("mean", "median"))
                rows.append([metric.name, mean, span, median, str(numbers["targets"])])
        yield table(("score", "mean", "95% interval", "median", "targets"), rows)
        for kind, numbers in result["calibration"].items():
            name, unit = ("pLDDT", "") if kind == "plddt" else ("PAE", " Å")
            yield f"{name}: calibration error {numbers['error']:.1f}{unit}, bias {numbers['bias']:+.1f}{unit}"
        yield ""
    for result in found["comparisons"]:
        yield f"{result['a']} against {result['b']}, {result['common']} targets that both have:"
        for metric in METRICS:
            if paired := result["metrics"].get(metric.key):
                span = f"no verdict ({paired['clusters']} clusters, fewer than {MIN_CLUSTERS})"
                if paired["interval"] is not None:
                    low, high = paired["interval"]
                    span = (
                        f"98.5% interval [{low:+.4f}, {high:+.4f}] ({paired['clusters']} clusters): {paired['verdict']}"
                    )
                counts = f"better on {paired['wins']}, worse on {paired['losses']}"
                yield f"  {metric.name:14s} improvement {paired['difference']:+.4f}, {span}; {counts}"
        yield ""
    if out is not None:
        yield f"{out / PAGE}: open it in a browser; {out / TABLE} and {out / REPORT} have the numbers"
