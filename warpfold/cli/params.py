"""`warpfold params` and `warpfold params fetch`."""

from dataclasses import KW_ONLY, asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from warpfold import arguments
from warpfold.arguments import Checked, PathLike, argument, decides, function, path_or_none, progress_of, reads, writes
from warpfold.cli.common import Answer, command, table, warn
from warpfold.errors import UserError
from warpfold.progress import Progress, progress_bar

if TYPE_CHECKING:
    from warpfold.prediction.params import ParamsFile


@dataclass(frozen=True)
class ParamsCommand(Checked):
    """Inspect a parameter file, check it, and write it in another format."""

    file: Annotated[
        PathLike,
        argument(
            "WarpFold's .safetensors, DeepMind's params_model_*.npz, OpenFold's .pt, or the folder of a run: its best."
        ),
    ]
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

        return inspect_params(arguments.path("file", self.file), self.check, path_or_none("out", self.out))


params = function(ParamsCommand)
TAR = "DeepMind's files come in a tar of 5.6 GB, which is downloaded completely and not kept; --from takes a tar."


@command(
    ParamsCommand,
    example="Example:  warpfold params params_model_1_ptm.npz --check\n\n"
    "To another format:  warpfold params finetuning_ptm_1.pt --out finetuning_ptm_1.safetensors\n\n"
    "To have some:  warpfold params fetch",
)
def params_in_shell(
    given: dict[str, Any], toml: Annotated[bool, writes("Print its settings as a file that `train` takes.")] = False
) -> Answer:
    """Print what the file is."""
    found = params(**given)
    rows = [found.toml().rstrip("\n")] if toml else (f"{what:12s} {value}" for what, value in found.rows())
    return Answer(found.to_dict(), rows, bool(found.problems))


@dataclass(frozen=True)
class FetchParamsCommand(Checked):
    """Fetch published parameters by name, DeepMind's or OpenFold's, into a folder; without a name, list them.

    After a lost connection the download goes on.  Proxies: HTTPS_PROXY and NO_PROXY.
    """

    name: Annotated[
        str | None, argument("A model, model_1_ptm or finetuning_ptm_1, or a set: ptm, multimer, openfold ...")
    ] = None
    _: KW_ONLY
    out: Annotated[PathLike, writes("Folder for the files; beside each: its address, SHA-256 and licence.")] = "params"
    source: Annotated[
        str | None, reads("Instead of the published address: that of a mirror, a folder, or the file.", "--from")
    ] = None
    progress: Progress | None = None

    def __call__(self) -> "list[ParamsFile]":
        """Describe each file, of which every number is checked.  Files that are there already are kept.

        Errors: UserError for an unknown name, a file that is there and is another one, and a download that fails.
        """
        from warpfold.prediction.published import fetch_params as fetching

        if self.name is None:
            raise UserError("fetch_params: name is missing; `warpfold params fetch` lists what there is")
        return fetching(self.name, arguments.path("out", self.out), self.source, progress_of(self.progress))


fetch_params = function(FetchParamsCommand)


@command(
    FetchParamsCommand,
    name="params fetch",
    example="Example:  warpfold params fetch model_1_ptm --out params\n\n"
    "Without the published address:  warpfold params fetch ptm --from /data/alphafold_params_2022-12-06.tar",
)
def fetch_params_in_shell(given: dict[str, Any]) -> Answer:
    """Print what was fetched, or the list."""
    from warpfold.prediction.published import OPENFOLD, PUBLISHED, SETS, published

    if given["name"] is None:
        single = {name: (name,) for name, one in PUBLISHED.items() if one.terms is OPENFOLD}
        rows = []
        for name, names in (SETS | single).items():
            of = [PUBLISHED[one] for one in names]
            models = f"{names[0]} ... {names[-1]}" if len(names) > 1 else ""
            size = f"{sum(one.megabytes for one in of) / 1000:.1f} GB"
            rows.append((name, models, size, of[0].about if len(of) <= 5 else "all of them", of[0].terms.licence))
        heads = ("name", "each by its name, too", "size", "what it folds", "licence")
        return Answer([asdict(one) for one in PUBLISHED.values()], [table(heads, rows), "", TAR])
    for terms in dict.fromkeys(one.terms for one in published(given["name"])):
        warn(f"{terms.title}, by {terms.by}\nlicence: {terms.licence}, {terms.licence_address} ({terms.page})")
        warn(f"cite: {terms.cite}")
    with progress_bar(every=10.0) as progress:
        found = fetch_params(**given, progress=progress)
    text = [
        f"{one.path}: {one.model}, {one.parameters:,} parameters, {'; '.join(one.problems or ('whole, all finite',))}"
        for one in found
    ]
    return Answer([one.to_dict() for one in found], text, any(one.problems for one in found))
