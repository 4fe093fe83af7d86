"""Everything that reads a file from outside, each with small whole files to damage, and what it may do with them.

A reader returns what it has understood, as plain values and arrays: the meaning.  Damaged files may be refused (one
line that names the file), or read; what they may not be read as:

* where the format has a checksum (`sealed`), anything but the meaning of the whole file, or a part of its rows;
* numbers that are not finite, coordinates beyond a million angstrom, arrays whose lengths disagree (`check`).
"""

import gzip
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.reliability.small import DESIGN, training, write_small
from tests.data.example.test_hits import QUERY, hhr, random_rows
from tests.data.search.alignment_server import msa_files, packed
from tests.helpers import tiny_config, tiny_model
from tests.model.test_openfold_files import as_openfold
from tests.model.torch_files import save as save_torch
from warpfold import settings
from warpfold.data.example.guess import read_guess
from warpfold.data.example.hits import read_hits
from warpfold.data.example.query_files import read_query_files
from warpfold.data.example.templates import template_from_file
from warpfold.data.formats.alignment import parse_alignment, parse_chain_alignments, read_alignment
from warpfold.data.formats.input_files import find
from warpfold.data.formats.predictions import read_pae
from warpfold.data.load.schedule import State
from warpfold.data.pack.merge import finished_report
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import pack
from warpfold.data.pack.part import PartFolder
from warpfold.data.pack.predicted import divergences, read_distogram
from warpfold.data.search.answer import DamagedAnswer, read_rows, unpacked
from warpfold.data.search.database import survey_fasta
from warpfold.data.similar.clusters import read_clusters
from warpfold.data.store.store import Store
from warpfold.data.store.stored_example import entry_keys, open_entry, read_example
from warpfold.data.structure.assemblies import apply_operator
from warpfold.data.structure.chain import Structure
from warpfold.data.structure.library import Library
from warpfold.data.structure.mmcif import read_structure
from warpfold.data.structure.write import write_mmcif, write_pdb
from warpfold.design.run import run_design
from warpfold.design.settings import load_design
from warpfold.design.state import StartState
from warpfold.design.state import read_rows as read_steps
from warpfold.engine.checkpoint import RunFolder
from warpfold.engine.resume import Checkpoints
from warpfold.engine.trunk import TrunkStore
from warpfold.errors import UserError
from warpfold.evaluation.layouts import find_predictions
from warpfold.evaluation.suite import read_suite
from warpfold.files import read_file
from warpfold.finetuning.split import Split, read_split
from warpfold.model.weights.deepmind import to_deepmind
from warpfold.model.weights.files import data_settings, load_model, save_params
from warpfold.ops.triton import launch
from warpfold.parallel.team import Team
from warpfold.prediction.fold_options import PredictOptions
from warpfold.prediction.folder import Journal, read_journals
from warpfold.prediction.outputs import claim_folder, damaged_files
from warpfold.prediction.predict import predict
from warpfold.prediction.predictor import load
from warpfold.scoring.selection import NUMBERS, Selection, keep_of
from warpfold.training.config import load_settings
from warpfold.training.ledger import Ledger
from warpfold.training.train import train
from warpfold.training.validate import settings_of

FARTHEST = 1e6  # angstrom: no structure is that large; assemblies that move a chain so far are refused, too
REALDATA = Path(__file__).parents[2] / "../shared/realdata"
LARGEST = 120_000  # bytes of a real file: larger ones take the time of many small ones

Files = Mapping[str, bytes]  # by their paths in a folder
Read = Callable[[Path], Any]


@dataclass(frozen=True)
class Reader:
    """A way in.

    bases: whole files by name, of which one is damaged.  read: of the folder that the files are in.  damaged: what the
    names of those that are damaged contain.  text: what it is damaged as.  packed: it may be gzipped.  sealed: a
    checksum covers every byte that is understood.  rows: what is understood is a list, of which a part may be lost.
    ends: the format says where it ends, so that a file cut short is told.  weight: share of the cases.
    named: an error names the file or its folder; not where there is none.
    """

    name: str
    bases: list[Files]
    read: Read
    damaged: str = ""
    text: bool = True
    packed: bool = False
    sealed: bool = False
    rows: bool = False
    ends: bool = False
    weight: float = 1.0
    named: bool = True


# What is understood


def plain(value: Any) -> Any:
    """Make of what a reader returned nested lists, numbers, texts and arrays, which can be compared."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(torch.float32).numpy() if value.dtype == torch.bfloat16 else value.detach().numpy()
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(one) for name, one in vars(value).items() if not name.startswith("_")}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one) for one in value]
    if isinstance(value, date | Path | slice):
        return str(value)
    return value


def same(one: Any, other: Any) -> bool:
    """Return whether two meanings are equal, to the bit."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        a, b = np.asarray(one), np.asarray(other)
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) and type(one) is type(other)


def odd_numbers(value: Any, where: str = "") -> Iterator[str]:
    """Find numbers that are not finite."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "fc" and not np.isfinite(value).all():
            yield f"{where}: not finite"
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from odd_numbers(one, f"{where}.{key}")
    elif isinstance(value, list):
        for one in value:
            yield from odd_numbers(one, where)
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{where}: {value}"


class Silent(Exception):
    """Damage was accepted without a word."""


def of_structure(found: Structure) -> Any:
    """Check a structure, and return what is in it."""
    for name, chain in found.chains.items():
        n = len(chain.sequence)
        shapes = chain.positions.shape, chain.mask.shape, chain.residue_index.shape
        if shapes != ((n, 37, 3), (n, 37), (n,)) or len(chain.author_numbers) != n:
            raise Silent(f"chain {name} of {n} residues has arrays of {shapes}")
        if not np.isfinite(chain.positions).all() or np.abs(chain.positions).max(initial=0) >= FARTHEST:
            raise Silent(f"chain {name}: coordinates up to {np.abs(chain.positions).max()}")
        if not np.isin(chain.mask, (0, 1)).all() or (chain.positions[chain.mask == 0] != 0).any():
            raise Silent(f"chain {name}: its mask is no mask")
    if found.resolution is not None and not 0 <= found.resolution < 1e6:
        raise Silent(f"resolution {found.resolution}")
    try:
        whole = found.assembly()
        placed = {
            f"{number} {chain}": apply_operator(operator, found.chains[chain].positions)
            for number, (chain, operator) in enumerate(whole.chains)
        }
        if any(np.abs(x).max(initial=0) >= 2 * FARTHEST or not np.isfinite(x).all() for x in placed.values()):
            raise Silent("an assembly that is nowhere")
    except UserError as error:
        placed = {"refused": np.zeros(0)}
        check_line(error)
    # B factors may be NaN: "without".
    chains = {name: replace(chain, b_factors=None) for name, chain in found.chains.items()}
    kept = {"id", "method", "resolution", "release_date", "dropped"}
    return {key: value for key, value in vars(found).items() if key in kept} | {"chains": chains, "assembly": placed}


def check_line(error: UserError) -> None:
    """Raise Silent where an error is not one line that a person reads."""
    text = str(error)
    if "\n" in text or not text.strip() or len(text) > 2500:
        raise Silent(f"an error of {text.count(chr(10)) + 1} lines and {len(text)} letters: {text[:80]!r}")


def of_alignment(found: Any) -> Any:
    """Check an alignment."""
    if (found.rows > 21).any() or (found.deletions < 0).any() or (found.rows[0] == 21).any():
        raise Silent("codes that are no residues, or negative deletions")
    return found


def of_queries(path: Path) -> Any:
    """Read queries; one that fails alone counts as refused where all do."""
    found = read_query_files([path])
    errors = [one.error for one in found.found if one.error]
    for error in errors:
        check_line(UserError(error))
    if errors and len(errors) == len(found.found):
        raise UserError(errors[0])
    for one in found.found:
        if not one.error and (len(one.ids) != len(one.sequences) or not all(one.sequences)):
            raise Silent("a complex with a chain without residues")
    return [{"name": one.name, "ids": one.ids, "sequences": one.sequences, "error": one.error} for one in found.found]


def of_store(path: Path) -> Any:
    """Read all of a store."""
    store = Store(path)
    try:
        if damaged := list(store.verify()):
            raise UserError(damaged[0])
        meaning: dict[str, Any] = {name: store.column(name) for name in store.columns}
        for key in store.keys:
            record = store.record(key)
            meaning[key] = {name: record.read(name) for name in record.arrays} | {"notes": record.notes}
        for key in entry_keys(store, assemblies=False):
            meaning[f"example {key}"] = read_example(store, key).positions
        for key in entry_keys(store, assemblies=True):
            open_entry(store, key, assemblies=True)
        return meaning
    finally:
        store.close()


def of_run(path: Path) -> Any:
    """Continue a run as far as reading goes."""
    with RunFolder(path, score="lddt_ca") as run:
        text = run.settings_text()
        found = run.load_latest()
        last = run.open_log(found.step if found else 0)
        state = {} if found is None else {"step": found.step, "tensors": found.tensors, "notes": found.notes}
        return {"settings": bool(text), "last": bool(last)} | state


def of_params(path: Path) -> Any:
    """Load a model."""
    model = load_model(path)
    return {"state": model.state_dict(), "config": settings.to_dict(model.config), "data": data_settings(path)}


def of_predictions(folder: Path) -> Any:
    """Read a folder of predictions as `evaluate` does."""
    found = find_predictions(folder)
    meaning = []
    for file in found.files:
        structure = read_structure(file.path, ca_only=True)
        seen = np.concatenate([chain.mask[:, 1] > 0 for chain in structure.chains.values()])
        pae = None if file.pae is None else read_pae(file.pae, seen)
        if pae is not None and not np.isfinite(pae[seen][:, seen]).all():
            raise Silent("PAE of residues with atoms is not finite")
        chains = of_structure(structure)["chains"]
        meaning.append([file.target, file.rank, file.layout, chains, None if pae is None else np.nan_to_num(pae)])
    return [meaning, dict(found.failures)]


def of_entries(folder: Path, form: str, run: str) -> list[Any]:
    """Continue a run of `predict` as far as reading goes: its entries that are whole."""
    summary = claim_folder(folder, form, run)
    return [entry for entry in (summary or {}).get("predictions", []) if not damaged_files(folder, entry)]


def of_part(path: Path) -> list[Any]:
    """Continue a part of a store as far as reading goes: what each job that is done has left."""
    part = PartFolder(path)
    done = []
    for job, one in part.results.items():
        done.append([job, one.data, [part.record(*one.place(i)) for i in range(len(one.sizes))]])
    return [*done, *map(list, part.queries.items())]


def of_trunk(folder: Path) -> Any:
    """Read what a frozen trunk made of an example."""
    store = TrunkStore(folder)
    found = store.read(store.path(0, "key", 0), torch.device("cpu"))
    if found is None:
        raise UserError(f"{folder}: is made again")
    return found


# The whole files


def tree(folder: Path) -> dict[str, bytes]:
    """Read all files of a folder."""
    return {str(one.relative_to(folder)): one.read_bytes() for one in sorted(folder.rglob("*")) if one.is_file()}


def under(prefix: str, files: Files) -> dict[str, bytes]:
    return {f"{prefix}/{name}": data for name, data in files.items()}


def real(pattern: str, most: int = 3) -> list[bytes]:
    """Read the smallest real files of a pattern, unpacked; none where they are not there."""
    found = sorted(REALDATA.glob(pattern), key=lambda path: (path.stat().st_size, path.name))
    texts = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes() for path in found[:40])
    return [text for text in texts if len(text) <= LARGEST][:most]


def json_of(value: Any) -> bytes:
    return json.dumps(value).encode()


def make_readers(work: Path) -> list[Reader]:
    """Make all whole files under `work`, and list the readers."""
    small = write_small(work / "small")
    mmcifs = [path.read_bytes() for path in sorted((small / "proteins/mmcif").glob("*.cif"))[-2:]]
    structures = [read_structure(path) for path in sorted((small / "proteins/mmcif").glob("*.cif"))[:2]]
    chains = [next(iter(one.chains.values())) for one in structures]
    confidence = [np.linspace(50, 90, len(chain.sequence)) for chain in chains]
    modelled = [
        write_mmcif("made", [chain], b_factors=[b], release_date="2020-02-03").encode()
        for chain, b in zip(chains, confidence)
    ]
    pdbs = [write_pdb("made", [chain], b_factors=[b]).encode() for chain, b in zip(chains, confidence)]
    a3ms = [path.read_bytes() for path in sorted((small / "proteins/msas").glob("*.a3m"))[:2]]
    query = read_alignment(sorted((small / "proteins/msas").glob("*.a3m"))[0]).query
    aligned = ["".join(c for c in row if not c.islower()) for row in a3ms[0].decode().splitlines()[1::2]]
    names = [f"UniRef100_{i}/1-{len(query)}" for i in range(len(aligned))]
    stockholm = "# STOCKHOLM 1.0\n#=GF ID made\n\n"
    stockholm += (
        "".join(f"{name:30s} {row}\n" for name, row in zip(names, aligned)) + f"#=GC RF {'x' * len(query)}\n//\n"
    )
    afa = "".join(f">{name}\n{row.replace('.', '-')}\n" for name, row in zip(names, aligned))
    n = len(query)
    halves = f"#{n // 2},{n - n // 2}\t1,1\n>101\t102\n{query}\n" + "".join(
        f">{name}\n{row}\n" for name, row in zip(names[1:], aligned[1:])
    )
    rng = np.random.default_rng(0)
    hits = hhr([random_rows(rng) for _ in range(3)], 40)
    found_rows = "# STOCKHOLM 1.0\n\n" + "".join(
        f"{i}abc_A/{i + 1}-{i + len(QUERY)} {QUERY}\n"
        f"#=GS {i}abc_A/{i + 1}-{i + len(QUERY)} DE mol:protein length:90  Some\n"
        for i in range(3)
    )
    found_rows += f"#=GC RF {'x' * len(QUERY)}\n//\n"
    found_a3m = "".join(f">{i}abc_A/{i + 1}-{i + len(QUERY)} [subseq from] mol:protein\n{QUERY}\n" for i in range(3))
    length = len(chains[0].sequence)
    pae = rng.uniform(0, 30, (length, length)).round(1)
    flat = {"residue1": [], "residue2": [], "distance": pae.ravel().tolist(), "max_predicted_aligned_error": 31.75}
    paes: list[Any] = [
        [{"predicted_aligned_error": pae.tolist(), "max_predicted_aligned_error": 31.75}],
        {"plddt": [80.0] * length, "pae": pae.tolist(), "ptm": 0.5},
        [flat],
    ]
    fastas = [
        (small / "queries.fasta").read_bytes(),
        b">one a protein\nMKTAYIAKQRQISFVKSHFSRQ\nLEERLGLIEVQ\n>two:three\nMKTAYIAKQRQISFV:SHFSRQLEERLGL\n",
    ]
    table = b'id,sequence\nd1,MKTAYIAKQRQISFVKSHFSRQ\nd2,"MKTAYIAKQRQ:ISFVKSHFSRQ"\nd3,MKTAYIAKQRQISFVKSHFSRW\n'
    jobs = {
        "job.json": json_of(
            {
                "name": "two",
                "modelSeeds": [1],
                "dialect": "alphafold3",
                "version": 1,
                "sequences": [{"protein": {"id": ["A", "B"], "sequence": "MKTAYIAKQRQISFVKSHFSRQ"}}],
            }
        ),
        "server.json": json_of(
            [{"name": "s", "sequences": [{"proteinChain": {"sequence": "MKTAYIAKQRQISFVKSHFSRQ", "count": 2}}]}]
        ),
        "boltz.yaml": b"version: 1\nsequences:\n  - protein:\n      id: [A, B]\n      sequence: MKTAYIAKQRQISFVKS\n"
        b"  - protein:\n      id: C\n      sequence: MKTAYIAKQRQ\n      msa: empty\n",
    }
    # Runs
    trained, folded, designed = work / "run", work / "folded", work / "designed"
    store = Store(small / "store")
    if not (trained / "card.md").exists():
        train(training(steps=4, save_every=2, validate_every=2), store, trained)
    run = tree(trained)
    if not (folded / "report.html").exists():
        wanted = PredictOptions(device="cpu", recycles=0)
        predict(small / "queries.fasta", [], small / "tiny.safetensors", folded, wanted)
    outputs = tree(folded)
    identity = json.loads(outputs["summary.json"])["run"]
    form = json.loads(outputs["summary.json"])["format"]
    entries = json.loads(outputs["summary.json"])["predictions"]
    outputs = {name: data for name, data in outputs.items() if not name.endswith((".html", "lock"))}
    journalled = work / "journalled"
    if not journalled.exists():
        journal = Journal(journalled, "the run")
        for entry in entries:
            journal.write({"of": ["q", "m", 0], "entry": entry})
        journal.close()
        (journalled / "journal/lock").unlink(missing_ok=True)
    predictor = load(small / "tiny.safetensors", "cpu")
    if not (designed / "design.json").exists():
        run_design(predictor, load_design(small / "design.toml"), designed, 1, 0, "x")
        state = StartState({"A": rng.normal(size=(8, 20)).astype(np.float32)}, 5, 1.5, {"A": "AAAAAAAA"}, {})
        state.write(work / "state.safetensors")
    design_steps = (designed / "starts/design_0001.jsonl").read_bytes()
    parts = work / "parts"
    if not parts.exists():
        from warpfold.bulk import JobPart

        pack([small / "proteins"], [small / "proteins"], parts / "s", PackOptions(), part=JobPart(1, 1))
    part = next((one for one in parts.iterdir() if (one / "plan.json").exists()), None)
    # Parameters
    config = replace(tiny_config(), recycles=3, structure=replace(tiny_config().structure, layers=8))
    model = tiny_model(recycles=3, structure=config.structure)
    np.savez(work / "params_model_1.npz", **to_deepmind(model))
    save_params(work / "p.safetensors", model, {"max_msa": 4, "max_extra": 4})
    save_torch(work / "p.pt", as_openfold(model))
    # Checkpoints of a user's loop, the trunk's store, a split, lists
    loop = work / "loop"
    linear = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(linear.parameters())
    if not loop.exists():
        linear(torch.ones(3)).sum().backward()
        optimizer.step()
        Checkpoints(loop).save(7, model=linear, optimizer=optimizer, more={"note": [1, 2.5, "x"]})
    trunk = TrunkStore(work / "trunk")
    if not trunk.folder.exists():
        trunk.begin("about")
        trunk.write(trunk.path(0, "key", 0), {"m": torch.randn(4, 5, 6), "aatype": torch.arange(5)})
    keys = entry_keys(store, assemblies=False)
    each = {"training": tuple(keys[:4]), "validation": tuple(keys[4:6]), "test": tuple(keys[6:])}
    Split(by="chain", **each).write(work / "split.toml")
    suite = b'title = "made"\n[targets]\nT1 = {}\nT2 = {released = 2020-01-02, chains = ["A"]}\n'
    clusters = b"1abc_A 2abc_B\n3abc_A\n4abc_C 5abc_A 6abc_A\n"
    expressions = [b"ipsae > 0.6 and rmsd < 2", b"best:100:ipsae", b"not (mean_plddt <= 70 or 0.5 < iptm < 0.9)", b"12"]
    rows = [{name: 0.5 for name in NUMBERS} | {"name": "x", "model": "m", "seed": 1}]
    tomls = [(small / "tiny.toml").read_bytes(), (Path(settings.presets()["multimer"])).read_bytes()]
    distogram = rng.dirichlet(np.ones(8), (40, 40)).astype(np.float16)
    buffer = io.BytesIO()
    np.save(buffer, distogram)
    reference = rng.dirichlet(np.ones(8), 128)
    answers = packed(msa_files([query]))

    def kept_by(folder: Path) -> Any:
        text = (folder / "keep.txt").read_bytes().decode("utf-8", "replace")
        found = keep_of(text)
        return [found.chosen(rows) if isinstance(found, Selection) and found.best is None else str(found)]

    def answered(folder: Path) -> Any:
        try:
            with open(folder / "answer.tar.gz", "rb") as file:
                return read_rows(unpacked(file, 10**7), query)
        except DamagedAnswer as error:
            check_line(UserError(str(error)))
            raise UserError(f"{folder / 'answer.tar.gz'}: {error}") from None

    def resumed(folder: Path) -> Any:
        own = torch.nn.Linear(3, 2)
        adam = torch.optim.Adam(own.parameters())
        found = Checkpoints(folder / "loop").load_latest(model=own, optimizer=adam)
        return [found.step, found.more, own.state_dict(), adam.state_dict()["state"]]

    def ledger(folder: Path) -> Any:
        with Ledger(folder / "run", data_of_run, 0, State(), None, Team()) as found:
            return [found.replay, found.quarantined]

    data_of_run = run["order.txt"].decode().split("\n")[0].split()[-1]
    aside = under(
        "run", {"order.txt": run["order.txt"], "quarantine.jsonl": b'{"name": "a", "example": 3, "reason": "x"}\n' * 2}
    )
    files: list[Reader] = [
        Reader(
            "mmCIF",
            [{"x.cif": one} for one in (*mmcifs, *modelled, *real("mmcif/*.cif.gz"))],
            lambda at: of_structure(read_structure(at / "x.cif")),
            ends=True,
            packed=True,
            weight=5,
        ),
        Reader(
            "PDB",
            [{"x.pdb": one} for one in (*pdbs, *real("pdb/*.gz"), *real("pdb/*.pdb"))],
            lambda at: of_structure(read_structure(at / "x.pdb")),
            packed=True,
            weight=4,
        ),
        Reader(
            "A3M",
            [{"x.a3m": one} for one in (*a3ms, *real("msas/**/*.a3m*"))],
            lambda at: of_alignment(read_alignment(at / "x.a3m")),
            packed=True,
            weight=4,
        ),
        Reader(
            "A3M of a known query",
            [{"x.a3m": a3ms[0]}],
            lambda at: of_alignment(read_alignment(at / "x.a3m", query)),
            packed=True,
            weight=2,
        ),
        Reader(
            "Stockholm",
            [{"x.sto": one} for one in (stockholm.encode(), *real("msas/**/*.sto*"))],
            lambda at: of_alignment(read_alignment(at / "x.sto", None)),
            ends=True,
            packed=True,
            weight=3,
        ),
        Reader(
            "aligned FASTA, A2M, rows",
            [{"x.a2m": afa.encode()}, {"x.a2m": "\n".join(aligned).encode() + b"\n"}],
            lambda at: of_alignment(read_alignment(at / "x.a2m")),
            packed=True,
            weight=2,
        ),
        Reader(
            "ColabFold's A3M of a complex",
            [{"x.a3m": halves.encode()}, {"x.a3m": a3ms[0] + b"\0" + a3ms[1]}],
            lambda at: [
                of_alignment(one) for one in parse_chain_alignments(read_file(at / "x.a3m"), str(at / "x.a3m"))
            ],
            packed=True,
            weight=2,
        ),
        Reader(
            "FASTA", [{"x.fasta": one} for one in fastas], lambda at: of_queries(at / "x.fasta"), packed=True, weight=3
        ),
        Reader(
            "table of sequences",
            [{"x.csv": table}, {"x.csv": table.replace(b",", b"\t")}],
            lambda at: of_queries(at / "x.csv"),
            packed=True,
            weight=3,
        ),
        *(
            Reader(
                f"jobs, {name}",
                [{name: data}],
                lambda at, name=name: of_queries(at / name),
                weight=1.5,
                ends="json" in name,
            )
            for name, data in jobs.items()
        ),
        Reader(
            "structures as queries",
            [{"x.cif": mmcifs[0]}, {"x.pdb": pdbs[0]}],
            lambda at: of_queries(at),
            packed=True,
            weight=1,
        ),
        Reader(
            "HHR",
            [{"x.hhr": one} for one in (hits.encode(),)],
            lambda at: read_hits(at / "x.hhr", QUERY),
            packed=True,
            weight=3,
        ),
        Reader(
            "hmmsearch",
            [{"x.sto": found_rows.encode()}, {"x.sto": found_a3m.encode()}],
            lambda at: read_hits(at / "x.sto", QUERY),
            packed=True,
            weight=2,
        ),
        Reader("a server's answer (tar.gz of A3M, m8)", [{"answer.tar.gz": answers}], answered, text=False, weight=2),
        Reader(
            "database of sequences",
            [{"x.fasta": (small / "database.fasta").read_bytes()}],
            lambda at: survey_fasta(at / "x.fasta").records,
            packed=True,
        ),
        Reader(
            "PAE",
            [{"x.json": json_of(one)} for one in paes],
            lambda at: read_pae(at / "x.json", np.ones(length, bool)),
            ends=True,
            packed=True,
            weight=2,
        ),
        Reader(
            "PAE, arrays",
            [{"x.npz": outputs["q0/q0.npz"]}],
            lambda at: read_pae(at / "x.npz", np.ones(12, bool)),
            text=False,
            sealed=True,
        ),
        Reader(
            "distogram",
            [{"x.npy": buffer.getvalue()}],
            lambda at: divergences(read_distogram(at / "x.npy", 40), reference),
            text=False,
        ),
        Reader(
            "predictions of WarpFold",
            [under("f", outputs)],
            lambda at: of_predictions(at / "f"),
            damaged="summary.json",
            weight=2,
        ),
        Reader(
            "predictions of AlphaFold DB",
            [{"f/AF-P1-F1-model_v4.cif": modelled[0], "f/AF-P1-F1-predicted_aligned_error_v4.json": json_of(paes[0])}],
            lambda at: of_predictions(at / "f"),
            ends=True,
            weight=2,
        ),
        Reader(
            "predictions of ColabFold",
            [
                {
                    "f/x_unrelaxed_rank_001_alphafold2_ptm_model_1_seed_000.pdb": pdbs[0],
                    "f/x_scores_rank_001_alphafold2_ptm_model_1_seed_000.json": json_of(paes[1]),
                    "f/x.a3m": a3ms[0],
                }
            ],
            lambda at: of_predictions(at / "f"),
            weight=2,
        ),
        Reader(
            "predictions of AlphaFold",
            [
                {
                    "t/ranked_0.pdb": pdbs[0],
                    "t/ranked_1.pdb": pdbs[1],
                    "t/ranking_debug.json": json_of({"plddts": {"m1": 80.0, "m2": 70.0}, "order": ["m1", "m2"]}),
                    "t/pae_m1.json": json_of(paes[0]),
                }
            ],
            lambda at: of_predictions(at / "t"),
            weight=2,
        ),
        Reader(
            "parameters, npz",
            [{"params_model_1.npz": (work / "params_model_1.npz").read_bytes()}],
            lambda at: of_params(at / "params_model_1.npz"),
            text=False,
            sealed=True,
            weight=0.6,
        ),
        Reader(
            "parameters, safetensors",
            [{"p.safetensors": (work / "p.safetensors").read_bytes()}],
            lambda at: of_params(at / "p.safetensors"),
            text=False,
            sealed=True,
            weight=0.6,
        ),
        Reader(
            "parameters, OpenFold's .pt",
            [{"p.pt": (work / "p.pt").read_bytes()}],
            lambda at: of_params(at / "p.pt"),
            text=False,
            sealed=True,
            weight=0.4,
        ),
        Reader(
            "store",
            [under("store", tree(small / "store"))],
            lambda at: of_store(at / "store"),
            text=False,
            sealed=True,
            weight=4,
        ),
        Reader(
            "settings",
            [{"x.toml": one} for one in tomls],
            lambda at: settings.to_dict(load_settings(at / "x.toml").config()),
            weight=5,
        ),
        Reader("settings of a design", [{"x.toml": DESIGN.encode()}], lambda at: load_design(at / "x.toml"), weight=3),
        Reader(
            "clusters",
            [{"x.txt": clusters}],
            lambda at: read_clusters(at / "x.txt", ["1abc_A", "3abc_A", "6abc_A"]),
            packed=True,
        ),
        Reader("list of targets", [{"x.toml": suite}], lambda at: read_suite(at / "x.toml").targets),
        Reader(
            "split",
            [{"split.toml": (work / "split.toml").read_bytes()}],
            lambda at: read_split(at / "split.toml", store),
        ),
        Reader(
            "checkpoints of a run",
            [under("run", {name: data for name, data in run.items() if "0004/" in name or name == "settings.toml"})],
            lambda at: of_run(at / "run"),
            damaged="checkpoints",
            text=False,
            sealed=True,
            weight=4,
        ),
        Reader(
            "log of a run (continued)",
            [
                under(
                    "run",
                    {
                        name: data
                        for name, data in run.items()
                        if "0004/" in name or name in ("metrics.jsonl", "settings.toml")
                    },
                )
            ],
            lambda at: of_run(at / "run"),
            damaged="metrics.jsonl",
            weight=1,
        ),
        Reader("order and quarantine of a run", [aside], ledger, weight=2),
        Reader(
            "checkpoints of a user's loop",
            [under("loop", tree(loop))],
            resumed,
            damaged="step-",
            text=False,
            sealed=True,
            weight=2,
        ),
        Reader(
            "what a frozen trunk made",
            [under("trunk", tree(trunk.folder))],
            lambda at: of_trunk(at / "trunk"),
            damaged=".safetensors",
            text=False,
            sealed=True,
            weight=1,
        ),
        Reader("filter of --keep", [{"keep.txt": one} for one in expressions], kept_by, weight=4, named=False),
        Reader(
            "journal of predictions",
            [tree(journalled)],
            lambda at: [row["entry"] for row in read_journals(at, "the run")],
            damaged=".jsonl",
            sealed=True,
            rows=True,
            weight=3,
        ),
        Reader(
            "summary and files of a run of predict",
            [under("f", outputs)],
            lambda at: of_entries(at / "f", form, identity),
            text=False,
            sealed=True,
            rows=True,
            weight=3,
        ),
        Reader(
            "state of a design",
            [{"s.safetensors": (work / "state.safetensors").read_bytes()}],
            lambda at: StartState.read(at / "s.safetensors"),
            text=False,
            sealed=True,
            weight=1.5,
        ),
        Reader("steps of a design", [{"s.jsonl": design_steps}], lambda at: read_steps(at / "s.jsonl"), weight=1),
        Reader(
            "finished design",
            [under("d", {name: data for name, data in tree(designed).items() if not name.endswith((".html", "lock"))})],
            lambda at: run_design(predictor, load_design(small / "design.toml"), at / "d", 1, 0, "x")["designs"],
            damaged=".json",
            weight=0.1,
        ),
        Reader(
            "an initial guess",
            [{"x.cif": modelled[0]}, {"x.pdb": pdbs[0]}],
            lambda at: {name: chain.positions for name, chain in read_guess(next(at.glob("x.*"))).items()},
            packed=True,
        ),
        Reader(
            "a template",
            [{"x.cif": modelled[0]}, {"x.pdb": pdbs[0]}],
            lambda at: template_from_file(query, next(at.glob("x.*")))[0].positions,
            packed=True,
            weight=0.5,
        ),
        Reader(
            "library of structures, obsolete.dat",
            [{"pdb/1abc.cif": modelled[0], "pdb/obsolete.dat": b"OBSLTE    26-SEP-06 2H33     1ABC 2OWI\n"}],
            lambda at: [Library(at / "pdb").current("2h33"), of_structure(Library(at / "pdb").read("1abc"))],
            damaged="",
            weight=0.5,
        ),
    ]
    sources = json.loads((small / "store/sources.json").read_text())
    files += [
        Reader(
            "settings of a run",
            [{"run/settings.toml": run["settings.toml"]}],
            lambda at: settings.to_dict(settings_of(at / "run")),
            weight=2,
        ),
        Reader(
            "report of a finished store",
            [under("store", {n: d for n, d in tree(small / "store").items() if n.endswith("json")})],
            lambda at: bool(finished_report(at / "store", sources)),
            damaged="json",
            weight=1,
        ),
        Reader(
            "launch table of a GPU",
            [{"t.json": Path(launch.__file__).with_name("tuned").joinpath("default.json").read_bytes()}],
            lambda at: launch.read.__wrapped__(at / "t.json").entries,
            weight=0.5,
        ),
        Reader(
            "database of alignments",
            [
                {
                    "db/a.index": json_of({"x_A": {"db": "a.db", "files": [["x.a3m", 0, len(a3ms[0])]]}}),
                    "db/a.db": a3ms[0],
                }
            ],
            lambda at: [
                of_alignment(parse_alignment(one.read_bytes(), str(one.path)))
                for one in find([at / "db/a.index"], (".a3m",), "alignments")
            ],
            weight=2,
        ),
    ]
    if part is not None:
        files.append(
            Reader(
                "part of a store (continued)",
                [under("part", {n: d for n, d in tree(part).items() if n != "lock"})],
                lambda at: of_part(at / "part"),
                text=False,
                rows=True,
                sealed=True,
                weight=2,
            )
        )
    return files
