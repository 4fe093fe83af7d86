"""What a prediction is asked for, declared once (warpfold/arguments.py) for the command and for Python.

Imports nothing heavy: `warpfold predict --help` is made of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from warpfold.arguments import (
    Checked,
    Device,
    Force,
    Memory,
    PathLike,
    Paths,
    Seed,
    Strict,
    WrongArgument,
    decides,
    is_list,
    path,
    reads,
    runs,
    shown,
    whole,
    writes,
)
from warpfold.errors import UserError
from warpfold.scoring.selection import Selection, keep_of

if TYPE_CHECKING:
    from warpfold.data.search.server import AlignmentServer
    from warpfold.model.alphafold import ModelConfig
    from warpfold.ops.dispatch import Kernels
    from warpfold.prediction.params import Params

# Inputs.
Template = Annotated[
    Paths | None,
    reads(
        "FILE or FILE:CHAIN: mmCIF or PDB structures, templates for every record, whatever their date; in a "
        "complex for the chains that they fit, or ID=FILE for chain ID.",
        shell=list[str] | None,
        path="local",
    ),
]
Hits = Annotated[
    Paths | None,
    reads("Template hits, .hhr or hmmsearch's; with several records, NAME.hhr for each, of a complex ID.hhr."),
]
TemplateStructures = Annotated[PathLike | None, reads("Folder of mmCIF files that the hits point to.")]
MaxTemplateDate = Annotated[str | None, reads("YYYY-MM-DD; hits whose structure came out later are refused.")]
InitialGuess = Annotated[
    PathLike | Mapping[str, Any] | None,
    reads(
        "Start the first pass from structures: a file, for every record; a folder of NAME.pdb or NAME.cif; or self: "
        "the records are structures.",
        shell=str | None,
        path="local",
    ),
]
FixedChains = Annotated[
    str | Sequence[str] | None,
    reads("Chains, A,B, that are to stay as in the initial guess: they are templates of themselves.", shell=str | None),
]
ServerLike = Union[str, "AlignmentServer", None]
MsaServer = Annotated[
    ServerLike,
    reads(
        "URL of an alignment server (ColabFold's protocol), to which sequences without alignment are SENT; without "
        "this nothing is sent anywhere.",
        shell=str | None,
    ),
]
MsaCache = Annotated[
    PathLike | None, writes("Folder for a server's answers, for several runs to share; default: OUT/alignments.")
]

# What is computed.
Recycles = Annotated[int | None, decides("Passes after the first; default: the model's.", min=0)]
RecycleTolerance = Annotated[
    float | None,
    decides(
        "Angstrom: recycle no more once distances between CA change by less (ColabFold's early stop); default: "
        "the model's.",
        min=0,
    ),
]
MaxRecycles = Annotated[
    str | tuple[int, int] | None,
    decides(
        "LENGTH:RECYCLES, such as 1500:3: at most so many passes after the first where there are more residues.",
        shell=str | None,
    ),
]
Ensemble = Annotated[int | None, decides("Samples of the alignment that each pass averages over.", min=1)]
Dropout = Annotated[
    bool, decides("Drop parts of the trunk's updates as in training, drawn by the seed: seeds then differ more.")
]
MaxMsa = Annotated[int | None, decides("Cluster centres of the alignment; default: as trained.", min=1)]
MaxExtra = Annotated[int | None, decides("Rows of the extra alignment; default: as trained.", min=0)]
Representations = Annotated[bool, writes("Keep single, pair, msa and the structure module's single in the .npz.")]
KeptRepresentations = Annotated[
    bool | PathLike | None,
    writes(
        "Keep single, pair, msa and the structure module's single in the .npz; or with NAME.store all but msa in half "
        "precision in a store, for thousands.",
        shell=str | None,
        metavar="[NAME.store]",
        path="local",
    ),
]
PairRepresentation = Annotated[
    Literal["pooled", "whole"],
    writes("Of pair, what a store of representations has: means over rows and columns, or all of it."),
]
Distogram = Annotated[bool, writes("Keep contacts in the .npz, and the distogram in a .npy.")]
SaveRecycles = Annotated[
    bool, writes("Write the structures of the passes before the last too: NAME_recycle_0.cif and so on.")
]
Logits = Annotated[bool, writes("Keep the logits of all heads.")]  # in Python alone

ChainGap = Annotated[
    int | None,
    decides(
        "Fold complexes with parameters for single chains: residue numbers jump by so much between chains (ColabFold: "
        "200).",
        min=32,
    ),
]

# How it runs.
Chunk = Annotated[int | None, runs("Rows computed at a time, 0 for all; default: what fits and is fast.", min=0)]
Offload = Annotated[
    bool | None,
    runs("Whether the pair representation lies in host memory; default: where nothing else fits.", show_default=False),
]
ReplayGraphs = Annotated[
    bool,
    runs(
        "Record the trunk as a CUDA graph for all recycles and all proteins of a padded length, where it fits.",
        "--graphs/--no-graphs",
    ),
]
TrunkPrecision = Annotated[
    Literal["auto", "fp32", "bf16", "bf16_all", "fp16"],
    runs(
        "Precision of the trunk's activations. auto: bf16 on GPUs from compute capability 8.0 on, fp32 elsewhere; "
        "bf16_all: of what follows it too."
    ),
]
DEFAULT_PRECISION: Literal["auto"] = "auto"  # of all predictions; parallel/plan.py resolves it for a device
Batch = Annotated[
    int | str,
    runs("Short proteins that share a pass of the model, at most; auto: where that was measured to help.", shell=str),
]


@dataclass(frozen=True)
class Recycling:
    """When recycling ends before all passes are done; it changes what is predicted.

    tolerance: angstrom, as `ModelConfig.recycle_tolerance`; None: the model's own.
    long: a protein of more than so many residues has at most so many passes after the first.
    Errors: UserError for what is not at least 0.
    """

    tolerance: float | None = None
    long: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.long is not None and min(self.long) < 0:
            raise UserError(f"--max-recycles {self.long[0]}:{self.long[1]}: two numbers of at least 0")

    @classmethod
    def of(cls, tolerance: float | None, most: str | tuple[int, int] | None) -> "Recycling":
        """Return when recycling ends, with `long` also as LENGTH:RECYCLES.  Errors: UserError for anything else."""
        long = None
        if isinstance(most, str):
            numbers = most.split(":")
            if len(numbers) != 2 or not all(map(str.isdecimal, numbers)):
                raise UserError(f"--max-recycles {most}: is not LENGTH:RECYCLES; write two numbers, such as 1500:3")
            long = int(numbers[0]), int(numbers[1])
        elif most is not None:
            if not is_list(most) or len(most) != 2:
                raise WrongArgument(f"max_recycles = {shown(most)}: two numbers are needed")
            long = whole("max_recycles[0]", most[0]), whole("max_recycles[1]", most[1])
        return cls(tolerance, long)

    def may_end_early(self, config: "ModelConfig", recycles: int | None) -> bool:
        """Return whether the end of one protein's recycling may differ from another's.

        A tolerance of 0 ends none, and with one recycle there is nothing to end.  recycles: None for the model's.
        """
        tolerance = config.recycle_tolerance if self.tolerance is None else self.tolerance
        recycles = config.recycles if recycles is None else recycles
        return self.long is not None or (bool(tolerance) and recycles > 1)

    def at_most(self, recycles: int, residues: int) -> int:
        """Return the passes after the first that a protein of this length gets, of `recycles` at most."""
        return recycles if self.long is None or residues <= self.long[0] else min(recycles, self.long[1])


@dataclass(frozen=True)
class Asked:
    """What every prediction of a run is asked for, beside structure and confidence.

    recycles, ensemble: None for the model's own.
    """

    recycles: int | None = None
    ensemble: int | None = None
    representations: bool = True
    distogram: bool = False
    logits: bool = False
    save_recycles: bool = False  # the structures of the passes before the last


@dataclass(frozen=True, kw_only=True)
class PredictOptions(Checked):
    """How to fold.  Whatever changes the result is part of the run's identity; device, chunk and kernels are not."""

    seed: Seed = 0
    seeds: Annotated[int, decides("Predict with this many seeds, SEED, SEED + 1 ..., and rank them.", min=1)] = 1
    recycles: Recycles = None
    recycle_tolerance: RecycleTolerance = None
    max_recycles: MaxRecycles = None
    ensemble: Ensemble = None
    dropout: Dropout = False
    max_msa: MaxMsa = None
    max_extra: MaxExtra = None
    chain_gap: ChainGap = None
    num_models: Annotated[int | None, reads("Of the parameters, use this many.", min=1)] = None
    complex: Annotated[
        bool | None,
        reads(
            "Whether the records of a FASTA file are the chains of one complex; default: if --params are a multimer's.",
            show_default=False,
        ),
    ] = None
    pairs: Annotated[
        Literal["all"] | None,
        reads("all: fold each two records as a complex, and each with itself; NAME is ONE_and_OTHER."),
    ] = None
    representations: KeptRepresentations = None
    pair_representation: PairRepresentation = "pooled"
    distogram: Distogram = False
    save_recycles: SaveRecycles = False
    keep: Annotated[
        int | str | None,
        writes(
            "N: of each protein's ranked predictions the best N keep all files, the others none that grow with the "
            'square of the length. best:N, best:N:SCORE, or an expression such as "ipsae > 0.6 and rmsd < 2": '
            "what keeps its structure, of the whole run; scores.csv has all. Default: all keep all.",
            shell=str | None,
        ),
    ] = None
    device: Device = None
    chunk: Chunk = None
    offload: Offload = None
    graphs: ReplayGraphs = True
    memory: Memory = None
    precision: TrunkPrecision = DEFAULT_PRECISION
    batch: Batch = "auto"
    strict: Strict = False
    force: Force = False

    def __post_init__(self) -> None:
        super().__post_init__()
        batch_of(self.batch)
        if self.pairs and self.complex:
            raise UserError("--pairs makes complexes itself of all records; leave --complex out")
        _ = self.recycling, self.memory_limit, self.selection, self.store  # which refuse what is none
        if self.pair_representation == "whole" and self.store is None:
            raise UserError("--pair-representation whole: is of a store; give --representations NAME.store too")

    @property
    def recycling(self) -> Recycling:
        """Return when recycling ends."""
        return Recycling.of(self.recycle_tolerance, self.max_recycles)

    @property
    def store(self) -> Path | None:
        """Return the store that the representations go to; None: to none.  Errors: UserError for another name."""
        if isinstance(self.representations, bool) or self.representations in (None, "npz"):
            return None
        found = path("representations", self.representations)
        if found.suffix != ".store":
            raise UserError(f"--representations {found}: the name of a store of representations ends in .store")
        return found

    @property
    def selection(self) -> int | Selection | None:
        """Return what keeps its files."""
        return keep_of(self.keep)

    @property
    def memory_limit(self) -> int | None:
        """Return bytes of the device that may be used at most; None: what is free."""
        from warpfold.cost.machine import parse_memory

        return None if self.memory is None else parse_memory(self.memory)

    @property
    def kernels(self) -> "Kernels":
        """Return which kernels, as `Plan.kernels`."""
        return "strict" if self.strict else "fast"

    @property
    def asked(self) -> Asked:
        """Return the requests that all predictions share."""
        return Asked(
            self.recycles, self.ensemble, bool(self.representations), self.distogram, save_recycles=self.save_recycles
        )

    @property
    def alone(self) -> bool:
        """Return whether no two proteins may share a pass, since what is drawn or kept is each's own."""
        return self.dropout or self.save_recycles

    def identity_settings(self, model: "Params") -> dict[str, Any]:
        """Return the settings that decide results beside parameters, queries and seeds, defaults filled in."""
        config, sample = model.config, model.sample
        # Named only if given: folders of earlier versions can be continued.
        given: dict[str, Any] = {"recycle_tolerance": self.recycling.tolerance, "max_recycles": self.recycling.long}
        given |= {name: getattr(self, name) or None for name in ("distogram", "dropout", "save_recycles", "chain_gap")}
        given |= {} if self.store is None else {"stored_pair": self.pair_representation}
        return {
            "recycles": config.recycles if self.recycles is None else self.recycles,
            "ensemble": config.ensemble if self.ensemble is None else self.ensemble,
            "max_msa": sample.max_msa if self.max_msa is None else self.max_msa,
            "max_extra": sample.max_extra if self.max_extra is None else self.max_extra,
            "precision": self.precision,
            "representations": bool(self.representations),
            **{name: value for name, value in given.items() if value is not None},
        }


def batch_of(value: Any) -> int | None:
    """Return the largest number of queries that share a pass; None for "auto".  Errors: UserError for anything else."""
    if value == "auto":
        return None
    if isinstance(value, str):
        if not (value.isdecimal() and len(value) < 6 and int(value) > 0):
            raise WrongArgument(f"--batch {value}: a number from 1 on, or auto")
        return int(value)
    return whole("batch", value, 1)
