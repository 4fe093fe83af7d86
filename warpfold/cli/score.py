"""`warpfold score`."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warpfold.arguments import Checked, PathLike, argument, function, path, reads, shown
from warpfold.cli.common import AsJson, command, show, show_table
from warpfold.errors import UserError

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
def in_shell(given: dict[str, Any], as_json: AsJson = False) -> None:
    """Print the scores."""
    from warpfold.scoring.score_complex import HEADS

    result = score(**given)
    if as_json:
        show(result.to_dict())
        return
    for what, value in result.rows():
        typer.echo(f"{what:18s} {value}")
    if result.complex and result.complex.interfaces:
        typer.echo()
        show_table(HEADS, result.complex.table())
