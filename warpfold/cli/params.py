"""`warpfold params` and `warpfold params fetch`."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from warpfold.arguments import PathLike, argument, checked, decides, path_or_none, progress_of, reads, writes
from warpfold.cli.common import Answer, command, table, warn
from warpfold.errors import UserError
from warpfold.progress import Progress, progress_bar

if TYPE_CHECKING:
    from warpfold.prediction.params import ParamsFile

TAR_NOTE = (
    "DeepMind's files come in a tar of 5.6 GB, which is downloaded completely and then deleted; --from reads a tar."
)


@checked()
def params(
    file: Annotated[
        PathLike,
        argument(
            "WarpFold's .safetensors, DeepMind's params_model_*.npz, OpenFold's .pt, or a run's folder (its best file)."
        ),
    ],
    *,
    check: Annotated[bool, decides("Check that all values are finite.")] = False,
    out: Annotated[
        PathLike | None, writes("A new file: .safetensors, or .npz with DeepMind's names for other programs.")
    ] = None,
) -> "ParamsFile":
    """Inspect a parameter file, check it, and write it in another format.

    Code in OpenFold's files is never executed.
    Errors: UserError for a file that cannot be read or has tensors that do not fit, and if `out` exists.
    """
    from warpfold.prediction.params import inspect_params

    return inspect_params(Path(file), check, path_or_none("out", out))


@command(
    params,
    example="Example:  warpfold params params_model_1_ptm.npz --check\n\n"
    "To another format:  warpfold params finetuning_ptm_1.pt --out finetuning_ptm_1.safetensors\n\n"
    "Download parameters:  warpfold params fetch",
)
def params_in_shell(
    given: dict[str, Any], toml: Annotated[bool, writes("Print the settings as a TOML file for `train`.")] = False
) -> Answer:
    """Inspect a parameter file, check it, and write it in another format."""
    file = params(**given)
    rows = [file.toml().rstrip("\n")] if toml else (f"{label:12s} {value}" for label, value in file.rows())
    return Answer(file.to_dict(), rows, bool(file.problems))


@checked()
def fetch_params(
    name: Annotated[
        str | None, argument("A model, model_1_ptm or finetuning_ptm_1, or a set: ptm, multimer, openfold ...")
    ] = None,
    *,
    out: Annotated[PathLike, writes("Folder for the files, with their addresses, SHA-256 and licences.")] = "params",
    source: Annotated[
        str | None, reads("Instead of the published address: that of a mirror, a folder, or the file.", "--from")
    ] = None,
    progress: Progress | None = None,
) -> "list[ParamsFile]":
    """Download published parameters of DeepMind or OpenFold by name into a folder, and check every number.

    A download continues after a lost connection. Existing files are kept. Returns a description of each file.
    Proxies: HTTPS_PROXY and NO_PROXY.
    Errors: UserError for an unknown name, an existing file with other content, and a failed download.
    """
    from warpfold.prediction.params import inspect_params
    from warpfold.prediction.published import fetch_params as fetch

    if name is None:
        raise UserError("fetch_params: name is missing. List the names with `warpfold params fetch`.")
    return fetch(name, Path(out), partial(inspect_params, check=True), source, progress_of(progress))


@command(
    fetch_params,
    name="params fetch",
    example="Example:  warpfold params fetch model_1_ptm --out params\n\n"
    "Without the published address:  warpfold params fetch ptm --from /data/alphafold_params_2022-12-06.tar",
)
def fetch_params_in_shell(given: dict[str, Any]) -> Answer:
    """Download published parameters of DeepMind or OpenFold by name into a folder; without a name, list them.

    A download continues after a lost connection. Proxies: HTTPS_PROXY and NO_PROXY.
    """
    from warpfold.prediction.published import OPENFOLD, PUBLISHED, SETS, published

    if given["name"] is None:
        single = {name: (name,) for name, model in PUBLISHED.items() if model.terms is OPENFOLD}
        rows = []
        for name, names in (SETS | single).items():
            models = [PUBLISHED[model] for model in names]
            listing = f"{names[0]} ... {names[-1]}" if len(names) > 1 else ""
            size = f"{sum(model.megabytes for model in models) / 1000:.1f} GB"
            purpose = models[0].about if len(models) <= 5 else "all of them"
            rows.append((name, listing, size, purpose, models[0].terms.licence))
        heads = ("name", "or a single model", "size", "folds", "licence")
        return Answer([asdict(model) for model in PUBLISHED.values()], [table(heads, rows), "", TAR_NOTE])
    for terms in dict.fromkeys(model.terms for model in published(given["name"])):
        warn(f"{terms.title}, by {terms.by}\nlicence: {terms.licence}, {terms.licence_address} ({terms.page})")
        warn(f"cite: {terms.cite}")
    with progress_bar(every=10.0) as progress:
        files = fetch_params(**given, progress=progress)
    text = [
        f"{file.path}: {file.model}, {file.parameters:,} parameters, "
        f"{'; '.join(file.problems or ('complete, all finite',))}"
        for file in files
    ]
    return Answer([file.to_dict() for file in files], text, any(file.problems for file in files))
