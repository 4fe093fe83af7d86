"""`warpfold params`."""

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from warpfold.arguments import Checked, PathLike, argument, decides, function, path, path_or_none, writes
from warpfold.cli.common import Answer, command

if TYPE_CHECKING:
    from warpfold.prediction.params import ParamsFile


@dataclass(frozen=True)
class ParamsCommand(Checked):
    """Inspect a parameter file, check it, and write it in another format."""

    file: Annotated[PathLike, argument("WarpFold's .safetensors, DeepMind's params_model_*.npz, or OpenFold's .pt.")]
    _: KW_ONLY
    check: Annotated[bool, decides("Check that all values are finite.")] = False
    out: Annotated[
        PathLike | None, writes("A new file: .safetensors, or .npz by DeepMind's names, which others read too.")
    ] = None

    def __call__(self) -> "ParamsFile":
        """Describe the file; nothing in OpenFold's is executed.

        Errors: UserError for a file that cannot be read, or whose tensors do not fit, and for an `out` that exists.
        """
        from warpfold.prediction.params import inspect_params

        return inspect_params(path("file", self.file), self.check, path_or_none("out", self.out))


params = function(ParamsCommand)


@command(
    ParamsCommand,
    example="Example:  warpfold params params_model_1_ptm.npz --check\n\n"
    "To another format:  warpfold params finetuning_ptm_1.pt --out finetuning_ptm_1.safetensors",
)
def params_in_shell(
    given: dict[str, Any],
    toml: Annotated[bool, writes("Print its settings as a file that `train` takes.")] = False,
) -> Answer:
    """Print what the file is."""
    found = params(**given)
    rows = [found.toml().rstrip("\n")] if toml else (f"{what:12s} {value}" for what, value in found.rows())
    return Answer(found.to_dict(), rows, bool(found.problems))
