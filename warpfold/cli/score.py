"""`warpfold score` and `warpfold golden`: compare with a reference."""

import sys
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import warpfold
from warpfold.arguments import Checked, PathLike, argument, function, path, reads, shown
from warpfold.cli.common import Answer, command, table
from warpfold.errors import UserError
from warpfold.progress import progress_bar

if TYPE_CHECKING:
    from warpfold.prediction.outputs import Prediction
    from warpfold.scoring.score import Score


@dataclass(frozen=True)
class ScoreCommand(Checked):
    """Compare a structure with its reference: lDDT, GDT, TM-score, RMSD; of complexes also DockQ and other scores."""

    predicted: Annotated["PathLike | Prediction", argument("mmCIF or PDB file.", shell=Path)]
    reference: Annotated["PathLike | Prediction", argument("mmCIF or PDB file: the truth.", shell=Path)]
    _: KW_ONLY
    chains: Annotated[
        str | Mapping[str, str] | None,
        reads("Pairs, predicted:reference, e.g. A:B,B:C; default: by sequence.", shell=str | None),
    ] = None
    assembly: Annotated[
        bool, reads("Compare with the first biological assembly of the reference, as predict folds it.")
    ] = False

    def __call__(self) -> "Score":
        """Return the scores.  Either structure may be a `Prediction`, and chains a mapping, predicted -> reference.

        Errors: UserError for files that cannot be read or have nothing in common.
        """
        from warpfold.scoring import score as scoring

        named = chain_pairs(self.chains) if isinstance(self.chains, str) else self.chains
        if named is not None and not isinstance(named, Mapping):
            raise UserError(f'chains = {shown(named)}: expected pairs, {{"A": "B"}} or "A:B"')
        ours, theirs = (
            path(what, given) if not hasattr(given, "structure") else given.structure()
            for what, given in (("predicted", self.predicted), ("reference", self.reference))
        )
        return scoring.score_files(ours, theirs, named, self.assembly)


def chain_pairs(text: str) -> dict[str, str]:
    """Return the pairs of "A:B,B:C", predicted -> reference.  Errors: UserError for anything else."""
    pairs = [pair.split(":") for pair in text.split(",")]
    if any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise UserError(f"--chains {text}: expected pairs of predicted:reference, for example A:B,B:C")
    named = dict(pairs)
    if len(named) < len(pairs):
        raise UserError(f"--chains {text}: names a predicted chain twice; name each once")
    return named


score = function(ScoreCommand)


@command(ScoreCommand, example="Example:  warpfold score predicted.cif 1ubq.cif.gz")
def score_in_shell(given: dict[str, Any]) -> Answer:
    """Print the scores."""
    from warpfold.scoring.score_complex import HEADS

    found = score(**given)
    text: list[Any] = [f"{what:18s} {value}" for what, value in found.rows()]
    if found.complex and found.complex.interfaces:
        text += ["", table(HEADS, found.complex.table())]
    return Answer(found.to_dict(), text)


@command(example="Example:  warpfold golden tests/golden --only units/*")
def golden(
    folder: Annotated[Path, argument("Folder of reference cases.")],
    only: Annotated[str | None, reads("A pattern for the cases' paths.")] = None,
) -> Answer:
    """Compare WarpFold with numbers of DeepMind's official code, array by array; in a clone."""
    checkout = Path(warpfold.__file__).parents[1]  # whose tests know how each case is computed
    if not (checkout / "tests/golden/run.py").is_file():
        raise UserError("golden: the reference cases are tests of a clone of WarpFold (tests/golden); run it there")
    sys.path.insert(0, str(checkout))
    from tests.golden import run

    with progress_bar() as progress:
        found = run.run(folder, only, progress)
    data = {"cases": run.as_data(found), "summary": run.summary(found)}
    return Answer(data, [run.table(found), run.summary(found)], any(one.verdict != run.PASS for one in found))
