"""`Request`: what a run of `predict` computes, from which inputs, and where it writes.

Every option is declared here once (warpfold/arguments.py).  The command line, `warpfold.predict` and `distill` produce
a `Request`; `Predictor.fold` and `load` declare the options that they share with it by the same annotations.
This module imports neither torch nor NumPy: `warpfold predict --help` and the checks of a command line depend on it.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from warpfold import arguments
from warpfold.arguments import (
    Checked,
    Cluster,
    Device,
    Force,
    Memory,
    PathLike,
    Paths,
    Seed,
    Shard,
    Strict,
    Workers,
    WrongArgument,
    argument,
    decides,
    is_list,
    parse_memory,
    path,
    path_or_none,
    paths,
    reads,
    runs,
    shown,
    whole,
    writes,
)
from warpfold.bulk import JobPart, require_cluster
from warpfold.errors import UserError
from warpfold.scoring.selection import Selection, keep_of

if TYPE_CHECKING:
    from warpfold.data.search.server import AlignmentServer
    from warpfold.model.alphafold import ModelConfig
    from warpfold.ops.dispatch import Kernels
    from warpfold.prediction.params import Params
    from warpfold.prediction.templates import TemplateSources

log = logging.getLogger("warpfold.plan")  # the messages of a server appear next to plans
FORMAT = "warpfold-predictions-1"  # of summary.json
SELF = "self"  # as an initial guess: the structure of the query itself
DEVICE = re.compile(r"cpu|mps(:0)?|(cuda|xpu|hpu|mtia)(:\d+)?")

# Inputs.
Template = Annotated[
    Paths | None,
    reads(
        "FILE or FILE:CHAIN: mmCIF or PDB structures that serve as templates for every record, whatever their date. "
        "In a complex, a file serves the chains that it fits, and ID=FILE serves chain ID.",
        shell=list[str] | None,
        path="local",
    ),
]
Hits = Annotated[
    Paths | None,
    reads("Template hits of HHsearch (.hhr) or hmmsearch. With several records, NAME.hhr each; in a complex, ID.hhr."),
]
TemplateStructures = Annotated[PathLike | None, reads("Folder of the mmCIF files that the hits refer to.")]
MaxTemplateDate = Annotated[str | None, reads("YYYY-MM-DD: refuse hits whose structure was released later.")]
InitialGuess = Annotated[
    PathLike | Mapping[str, Any] | None,
    reads(
        "Start the first pass from structures: a file for every record, a folder of NAME.pdb or NAME.cif, or self if "
        "the records are structures.",
        shell=str | None,
        path="local",
    ),
]
FixedChains = Annotated[
    str | Sequence[str] | None,
    reads("Chains, such as A,B, that keep the initial guess: each is its own template.", shell=str | None),
]
ServerLike = Union[str, "AlignmentServer", None]
MsaServer = Annotated[
    ServerLike,
    reads(
        "URL of an alignment server (ColabFold's protocol). Sequences without an alignment are SENT there. Without "
        "this option nothing is sent anywhere.",
        shell=str | None,
    ),
]
MsaCache = Annotated[
    PathLike | None, writes("Folder for the answers of a server, which runs may share; default: OUT/alignments.")
]

# What is computed.
Recycles = Annotated[int | None, decides("Passes after the first; default: the model's.", min=0)]
RecycleTolerance = Annotated[
    float | None,
    decides(
        "Angstrom: stop recycling when the distances between CA change by less (ColabFold's early stop); default: the "
        "model's.",
        min=0,
    ),
]
MaxRecycles = Annotated[
    str | tuple[int, int] | None,
    decides(
        "LENGTH:RECYCLES, such as 1500:3: proteins of more than LENGTH residues get at most RECYCLES passes after the "
        "first.",
        shell=str | None,
    ),
]
Ensemble = Annotated[int | None, decides("Samples of the alignment that each pass averages over.", min=1)]
Dropout = Annotated[
    bool, decides("Apply the trunk's dropout as in training, drawn by the seed: predictions of seeds differ more.")
]
MaxMsa = Annotated[int | None, decides("Cluster centres of the alignment; default: as trained.", min=1)]
MaxExtra = Annotated[int | None, decides("Rows of the extra alignment; default: as trained.", min=0)]
Representations = Annotated[
    bool, writes("Keep the single, pair and msa representations, and the structure module's single.")
]
KeptRepresentations = Annotated[
    bool | PathLike | None,
    writes(
        "Write the single, pair and msa representations and the structure module's single into the .npz. With "
        "NAME.store, write all but msa into a store in half precision, for thousands of predictions.",
        shell=str | None,
        metavar="[NAME.store]",
        path="local",
    ),
]
PairRepresentation = Annotated[
    Literal["pooled", "whole"],
    writes("Content of pair in a store of representations: the means over rows and over columns, or the whole tensor."),
]
Distogram = Annotated[bool, writes("Write contact probabilities into the .npz, and the distogram into a .npy.")]
SaveRecycles = Annotated[
    bool, writes("Write the structures of the passes before the last too: NAME_recycle_0.cif and so on.")
]
Logits = Annotated[bool, writes("Keep the logits of all heads.")]  # in Python alone
ChainGap = Annotated[
    int | None,
    decides(
        "Fold complexes with parameters for single chains: residue numbers jump by this much between chains "
        "(ColabFold: 200).",
        min=32,
    ),
]
WhichRelaxed = Literal["all", "best", "none"]

# How it runs.
Chunk = Annotated[
    int | None, runs("Rows computed at a time, 0 for all; default: the fastest plan that fits in memory.", min=0)
]
Offload = Annotated[
    bool | None,
    runs("Keep the pair representation in host memory; default: only if nothing else fits.", show_default=False),
]
ReplayGraphs = Annotated[
    bool,
    runs(
        "Record the trunk as a CUDA graph, which serves all recycles and all proteins of a padded length, if it fits.",
        "--graphs/--no-graphs",
    ),
]
TrunkPrecision = Annotated[
    Literal["auto", "fp32", "bf16", "bf16_all", "fp16"],
    runs(
        "Precision of the trunk's activations. auto: bf16 on GPUs of compute capability 8.0 or higher, otherwise "
        "fp32. bf16_all: bf16 after the trunk too."
    ),
]
DEFAULT_PRECISION: Literal["auto"] = "auto"  # parallel/plan.py resolves it for a device
Batch = Annotated[
    int | str,
    runs(
        "Largest number of short proteins that share a pass of the model; auto: share where measurements showed a "
        "gain.",
        shell=str,
    ),
]


@dataclass(frozen=True)
class Recycling:
    """When recycling ends before all passes are done, which changes the prediction.

    tolerance: angstrom, as `ModelConfig.recycle_tolerance`; None: the model's own.
    long: (length, recycles): proteins with more residues than `length` get at most `recycles` passes after the first.
    Errors: UserError for negative numbers.
    """

    tolerance: float | None = None
    long: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.long is not None and min(self.long) < 0:
            raise UserError(f"--max-recycles {self.long[0]}:{self.long[1]}: two numbers of at least 0")

    @classmethod
    def parse(cls, tolerance: float | None, most: str | tuple[int, int] | None) -> "Recycling":
        """Parse `most`, a pair or LENGTH:RECYCLES.  Errors: UserError for anything else."""
        long = None
        if isinstance(most, str):
            numbers = most.split(":")
            if len(numbers) != 2 or not all(map(str.isdecimal, numbers)):
                raise UserError(f"--max-recycles {most}: is not LENGTH:RECYCLES. Write two numbers, such as 1500:3.")
            long = int(numbers[0]), int(numbers[1])
        elif most is not None:
            if not is_list(most) or len(most) != 2:
                raise WrongArgument(f"max_recycles = {shown(most)}: two numbers are needed")
            long = whole("max_recycles[0]", most[0]), whole("max_recycles[1]", most[1])
        return cls(tolerance, long)

    def may_end_early(self, config: "ModelConfig", recycles: int | None) -> bool:
        """Return whether proteins in one pass may need different numbers of recycles.

        A tolerance of 0 never ends recycling, and with one recycle there is nothing to end.  recycles: None for the
        model's.
        """
        tolerance = config.recycle_tolerance if self.tolerance is None else self.tolerance
        recycles = config.recycles if recycles is None else recycles
        return self.long is not None or (bool(tolerance) and recycles > 1)

    def at_most(self, recycles: int, residues: int) -> int:
        """Limit the passes after the first for a protein of this length."""
        return recycles if self.long is None or residues <= self.long[0] else min(recycles, self.long[1])


@dataclass(frozen=True)
class FoldOptions:
    """The number of passes and the optional outputs of a prediction; recycles, ensemble: None for the model's own."""

    recycles: int | None = None
    ensemble: int | None = None
    representations: bool = True
    distogram: bool = False
    logits: bool = False
    save_recycles: bool = False  # the structures of the passes before the last


@dataclass(frozen=True, kw_only=True)
class Request(Checked):
    """The inputs, options and output folder of a run of `predict`.

    Errors: UserError for a wrong value; `check` finds wrong combinations and missing files.
    """

    query: Annotated[
        Paths,
        argument(
            "FASTA (A:B is a complex), CSV (id,sequence), alignments (A3M, Stockholm), structures (their chains), "
            "jobs of Boltz and AlphaFold 3 (YAML, JSON), folders of these, - (standard input), or a sequence itself.",
            metavar="QUERY...",
            shell=list[str],
            path="local",
        ),
    ] = field(kw_only=False)
    params: Annotated[
        Paths,
        reads(
            "WarpFold's .safetensors, DeepMind's params_model_*.npz (`warpfold params fetch`), or a folder of these. "
            "Several models each fold, and their predictions are ranked."
        ),
    ] = field(kw_only=False)
    out: Annotated[PathLike, writes("Folder for the predictions; a stopped run continues in it.")] = field(
        kw_only=False
    )
    msa: Annotated[
        Paths | None, reads("Alignments, or folders of them; each belongs to the sequence in its first row.")
    ] = None
    msa_server: MsaServer = None
    msa_cache: MsaCache = None
    template: Template = None
    hits: Hits = None
    template_structures: TemplateStructures = None
    max_template_date: MaxTemplateDate = None
    initial_guess: InitialGuess = None
    fixed_chains: FixedChains = None
    num_models: Annotated[int | None, reads("Use this many of the parameters.", min=1)] = None
    complex: Annotated[
        bool | None,
        reads(
            "Whether the records of a FASTA file are the chains of one complex; default: yes with parameters of a "
            "multimer.",
            show_default=False,
        ),
    ] = None
    pairs: Annotated[
        Literal["all"] | None,
        reads("all: fold every pair of records as a complex, and each record with itself, named ONE_and_OTHER."),
    ] = None
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
    relax: Annotated[
        WhichRelaxed,
        decides("Relax all predictions, or the best one of each query, with OpenMM: docs/howto/score.md."),
    ] = "none"
    representations: KeptRepresentations = None
    pair_representation: PairRepresentation = "pooled"
    distogram: Distogram = False
    save_recycles: SaveRecycles = False
    figures: Annotated[
        bool,
        writes("Draw pLDDT, PAE and alignment coverage of each prediction, PNG and SVG.", "--figures/--no-figures"),
    ] = True
    zip: Annotated[
        bool,
        writes("Write NAME_results.zip for each protein: structures, scores, figures, report and references."),
    ] = False
    keep: Annotated[
        int | str | None,
        writes(
            "N: the best N predictions of each protein keep all files; the others lose the files that grow with the "
            'square of the length. best:N, best:N:SCORE, or an expression such as "ipsae > 0.6 and rmsd < 2": only '
            "these predictions of the whole run keep their structures; scores.csv has all. Default: keep everything.",
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
    workers: Workers = 1
    cluster: Cluster = None
    shard: Shard = None
    strict: Strict = False
    force: Force = False

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_batch(self.batch)
        if self.pairs and self.complex:
            raise UserError("--pairs: it makes complexes of all records. Leave --complex out.")
        # These properties parse options, and raise UserError for wrong values.
        _ = self.recycling, self.memory_limit, self.selection, self.store, self.part, self.fixed
        if self.pair_representation == "whole" and self.store is None:
            raise UserError("--pair-representation whole: is of a store. Pass --representations NAME.store too.")

    def check(self) -> None:
        """Check the options together and the paths, without importing torch or writing anything.

        Errors: UserError for options that exclude each other, missing files and packages, and an `out` that is a file
        or holds something else.
        """
        if not self.queries:
            raise UserError("query: is empty. Name what to fold.")
        if not self.params_paths:
            raise UserError("params: is empty. Name files of parameters.")
        if self.device is not None and not DEVICE.fullmatch(self.device):
            raise UserError(
                f"--device {self.device}: not known. Pass cpu, cuda (an NVIDIA or AMD GPU), cuda:1 and so on, or mps "
                "on a Mac."
            )
        if self.fixed and self.initial_guess is None:
            raise UserError("--fixed-chains needs --initial-guess, the structure that the chains are to keep")
        if self.pairs and self.initial_guess is not None:
            raise UserError("--pairs: no structure of its complexes is known. Leave --initial-guess out.")
        if self.cluster is not None:
            require_cluster(self.cluster)
        from warpfold.data.example.query_files import check_path, is_sequence
        from warpfold.files import check_exists, claim_folder
        from warpfold.prediction.templates import check_template_file

        _ = self.server, self.template_sources
        for query in self.queries:
            if not (isinstance(query, str) and is_sequence(query)):
                check_path(query)
                if query != "-":
                    check_exists(Path(query))
        for file in [*self.params_paths, *self.alignments, *paths("hits", self.hits)]:
            check_exists(file)
        for template in paths("template", self.template):
            check_template_file(str(template))
        if (folder := path_or_none("template_structures", self.template_structures)) is not None:
            check_exists(folder)
        if self.guess not in (None, SELF):
            check_exists(Path(self.guess))
        claim_folder(Path(self.out), FORMAT, "", force=True)

    def for_workers(self) -> "Request":
        """Return the request without inputs, which workers get as queries; a server cannot be pickled."""
        files = "msa", "msa_server", "msa_cache", "template", "hits", "template_structures", "max_template_date"
        cleared: dict[str, Any] = dict.fromkeys((*files, "initial_guess", "fixed_chains"))
        return replace(self, query=[], **cleared)

    @property
    def queries(self) -> list[str | Path]:
        """Return files, folders, "-" for standard input, and sequences."""
        return arguments.queries("query", self.query)

    @property
    def params_paths(self) -> list[Path]:
        """Return files of parameters and folders of them."""
        return paths("params", self.params)

    @property
    def alignments(self) -> list[Path]:
        """Return files and folders of alignments."""
        return paths("msa", self.msa)

    @property
    def folder(self) -> Path:
        """Return the output folder."""
        return Path(self.out)

    @property
    def part(self) -> JobPart:
        """Return the part of the predictions that this process makes."""
        return JobPart.parse(self.shard) if self.shard else JobPart(1, 1)

    @property
    def starts_processes(self) -> bool:
        """Return whether workers of this machine or of a cluster fold."""
        return self.workers > 1 or self.cluster is not None

    @property
    def template_sources(self) -> "TemplateSources":
        """Return the sources of templates.  Errors: UserError for hits without structures, and a wrong date."""
        from warpfold.prediction.templates import TemplateSources

        return TemplateSources(
            files=[str(file) for file in paths("template", self.template)],
            hits=paths("hits", self.hits),
            structures=path_or_none("template_structures", self.template_structures),
            max_date=self.max_template_date,
        )

    @property
    def server(self) -> "AlignmentServer | None":
        """Return the server that is asked for alignments."""
        return server_of(self.msa_server, self.msa_cache, self.folder / "alignments")

    @property
    def guess(self) -> Any:
        """Return the initial guess: `SELF`, a file or folder, or None."""
        guess = self.initial_guess
        return guess if guess == SELF else path_or_none("initial_guess", guess)

    @property
    def fixed(self) -> tuple[str, ...]:
        """Return the fixed chains."""
        return parse_chains(self.fixed_chains)

    @property
    def recycling(self) -> Recycling:
        """Return when recycling ends."""
        return Recycling.parse(self.recycle_tolerance, self.max_recycles)

    @property
    def store(self) -> Path | None:
        """Return the store of representations, or None.  Errors: UserError for a name that does not end in .store."""
        if isinstance(self.representations, bool) or self.representations in (None, "npz"):
            return None
        store = path("representations", self.representations)
        if store.suffix != ".store":
            raise UserError(f"--representations {store}: the name of a store of representations ends in .store")
        return store

    @property
    def selection(self) -> int | Selection | None:
        """Return the parsed `keep`: which predictions keep their files."""
        return keep_of(self.keep)

    @property
    def memory_limit(self) -> int | None:
        """Return the bytes of the device that may be used; None: the free memory."""
        return None if self.memory is None else parse_memory(self.memory)

    @property
    def kernels(self) -> "Kernels":
        """Return the setting `Plan.kernels`."""
        return "strict" if self.strict else "fast"

    @property
    def fold_options(self) -> FoldOptions:
        """Return the options of every prediction."""
        return FoldOptions(
            self.recycles, self.ensemble, bool(self.representations), self.distogram, save_recycles=self.save_recycles
        )

    @property
    def folds_alone(self) -> bool:
        """Return whether no two proteins may share a pass, since each draws dropout or keeps its passes."""
        return self.dropout or self.save_recycles

    def identity_settings(self, model: "Params") -> dict[str, Any]:
        """Return the settings that decide results besides parameters, queries and seeds, with defaults filled in.

        Device, chunk, kernels and the like do not change the result, and are not part of a run's identity.
        """
        config, sample = model.config, model.sample
        # Absent unless set, so that folders of earlier versions can be continued.
        optional: dict[str, Any] = {"recycle_tolerance": self.recycling.tolerance, "max_recycles": self.recycling.long}
        optional |= {
            name: getattr(self, name) or None for name in ("distogram", "dropout", "save_recycles", "chain_gap")
        }
        optional |= {} if self.store is None else {"stored_pair": self.pair_representation}
        return {
            "recycles": config.recycles if self.recycles is None else self.recycles,
            "ensemble": config.ensemble if self.ensemble is None else self.ensemble,
            "max_msa": sample.max_msa if self.max_msa is None else self.max_msa,
            "max_extra": sample.max_extra if self.max_extra is None else self.max_extra,
            "precision": self.precision,
            "representations": bool(self.representations),
            **{name: value for name, value in optional.items() if value is not None},
        }


def parse_batch(value: Any) -> int | None:
    """Parse the largest number of queries that share a pass; None for "auto".  Errors: UserError for anything else."""
    if value == "auto":
        return None
    if isinstance(value, str):
        if not (value.isdecimal() and len(value) < 6 and int(value) > 0):
            raise WrongArgument(f"--batch {value}: a number from 1 on, or auto")
        return int(value)
    return whole("batch", value, 1)


def parse_chains(value: Any) -> tuple[str, ...]:
    """Parse names of chains, "A,B" or a list.  Errors: WrongArgument for anything else."""
    ids = value.split(",") if isinstance(value, str) else [] if value is None else value
    if not is_list(ids) or not all(isinstance(id, str) and id for id in ids):
        raise WrongArgument(f"--fixed-chains {shown(value)}: names of chains are needed, such as A,B")
    return tuple(ids)


def server_of(server: ServerLike, cache: PathLike | None, default: Path) -> "AlignmentServer | None":
    """Return the server at an address, or None without one.

    cache: the folder for its answers; None: `default`.
    Errors: UserError for a wrong address, and for a cache without a server.
    """
    if server is None:
        if cache is not None:
            raise UserError("--msa-cache: has no effect without --msa-server. Name a server, or leave it out.")
        return None
    from warpfold.data.search.server import AlignmentServer

    if isinstance(server, AlignmentServer):
        return server
    folder = path_or_none("msa_cache", cache) or default
    return AlignmentServer(arguments.text("msa_server", server), folder, say=log.info)
