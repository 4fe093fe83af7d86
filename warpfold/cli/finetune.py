"""`warpfold finetune`."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from warpfold import arguments
from warpfold.arguments import (
    Device,
    Force,
    Memory,
    PathLike,
    Seed,
    Workers,
    checked,
    decides,
    reads,
    runs,
    writes,
)
from warpfold.cli.common import Answer, command, log_plans
from warpfold.errors import UserError
from warpfold.progress import Progress, progress_bar


@checked()
def finetune(
    structures: Annotated[
        arguments.Paths, reads("mmCIF or PDB files, or folders of them; gz or not.", shell=list[Path])
    ],
    init: Annotated[PathLike, reads("Parameters to start from: WarpFold's, DeepMind's .npz or OpenFold's .pt.")],
    out: Annotated[PathLike, writes("Folder of the report and all else; the same command continues a stopped run.")],
    *,
    msas: Annotated[
        arguments.Paths | None, reads("A3M or Stockholm files of their alignments, or folders of them.")
    ] = None,
    search: Annotated[
        arguments.Paths | Mapping[str, PathLike] | None,
        reads(
            "Databases to find alignments in, FILE or NAME=FILE, as for `warpfold search`.",
            shell=list[str] | None,
            path="local",
        ),
    ] = None,
    rehearse: Annotated[
        str | None,
        reads("STORE=SHARE: draw this share of the examples from a general store, against forgetting.", path="store"),
    ] = None,
    split: Annotated[PathLike | None, reads("A split.toml of an earlier run, to repeat its split.")] = None,
    one_family: Annotated[bool, decides("Split by chain, where all are relatives; the report says so.")] = False,
    split_identity: Annotated[
        float,
        decides("Identity from which parts of chains count as related, 0.3 to 1; the report says if it is raised."),
    ] = 0.3,
    trainable: Annotated[
        str | None,
        decides("all, structure, heads, or patterns of parameters, a,b; default: all, with --adapters none."),
    ] = None,
    adapters: Annotated[int, decides("Rank of adapters on the trunk's projections; 0: none.", min=0)] = 0,
    steps: Annotated[int | None, decides("Training steps, at most; default: by the number of structures.", min=1)] = (
        None
    ),
    set: Annotated[
        arguments.Changes | None, decides("Settings over those that are chosen, KEY=VALUE.", shell=list[str] | None)
    ] = None,
    seed: Seed = 0,
    force: Force = False,
    workers: Workers = 1,
    processes: Annotated[
        int | None, runs("That train, each on a GPU of its own, or on the CPU; default: all GPUs, or 1.", min=1)
    ] = None,
    device: Device = None,
    memory: Memory = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Fine-tune a model on your structures, and measure the improvement on proteins that it never saw.

    Packs the structures, splits them by sequence cluster, trains, keeps the best parameters by validation, folds the
    test set before and after, and writes report.html and card.md. Returns the content of `out/summary.json`.
    Errors: UserError for unusable input, too few structures or clusters, and if `out` holds another run.
    """
    import torch

    from warpfold.cli.train import sources_of
    from warpfold.device import device_of
    from warpfold.finetuning import finetune as finetuning

    if not 0.3 <= split_identity <= 1:
        raise UserError(f"--split-identity {split_identity}: is out of range. Give a share from 0.3 to 1")
    rehearsal_source = None if rehearse is None else sources_of([rehearse])[0]
    if rehearsal_source is not None and not rehearsal_source.weight < 1:
        raise UserError(f"--rehearse {rehearse}: expected STORE=SHARE, with a share above 0 and below 1")
    if isinstance(search, Mapping):
        databases = [f"{name}={file}" for name, file in search.items()]
    else:
        databases = [str(file) for file in arguments.paths("search", search)]
    device_name = device_of(device)
    options = finetuning.FinetuneOptions(
        structures=arguments.paths("structures", structures),
        init=Path(init),
        msas=arguments.paths("msas", msas),
        search=databases,
        rehearse=rehearsal_source,
        split=arguments.path_or_none("split", split),
        one_family=one_family,
        split_identity=split_identity,
        trainable=[name.strip() for name in (trainable or "").split(",") if name.strip()],
        adapters=adapters,
        steps=steps,
        changes=arguments.changes_of("set", set),
        seed=seed,
        workers=workers,
        processes=processes or (torch.cuda.device_count() if device_name == "cuda" else 1),
        memory=None if memory is None else arguments.parse_memory(memory),
    )
    tell = arguments.progress_of(progress)
    typed_command = shlex.join(["warpfold", *sys.argv[1:]]) if sys.argv[1:2] == ["finetune"] else ""
    return finetuning.finetune(
        options, Path(out), force=force, device=device_name, command=typed_command, progress=tell
    )


@command(
    finetune,
    continues=True,
    example="Example:  warpfold finetune --structures mine/ --msas alignments/ --init params_model_1.npz --out tuned",
)
def finetune_in_shell(given: dict[str, Any]) -> Answer:
    """Fine-tune a model on your structures, and measure the improvement on proteins that it never saw.

    Packs the structures, splits them by sequence cluster, trains, keeps the best parameters by validation, folds the
    test set before and after, and writes report.html and card.md.
    """
    with progress_bar(narrate=True) as bar, log_plans():
        result = finetune(**given, progress=bar)
    from warpfold.finetuning.page import stated_relatives, verdict

    out = given["out"]
    lines = [
        verdict(result) + stated_relatives(result),
        f"parameters: {out / 'params.safetensors'}",
        f"open {out / 'report.html'}",
    ]
    return Answer(result, lines)
