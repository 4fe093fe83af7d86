"""Write the small good and bad files that the rows of the tables name."""

import gzip
import os
import re
from pathlib import Path

import numpy as np

from tests.bench.test_bench_accelerated import MINE
from tests.data.pack.pack_inputs import chain, make_files
from tests.data.search.families import database, queries
from tests.helpers import tiny_config, tiny_model, tiny_multimer
from tests.prediction.runs import write_entry
from tests.prediction.test_predict_complexes import multimer
from tests.training.runs import make_store
from warpfold.data.structure.write import write_mmcif
from warpfold.model.alphafold import HeadsConfig
from warpfold.model.template import TemplateConfig
from warpfold.model.weights.files import save_params

ONE, TWO = "MKTAYIAKQRQISFVKSH", "GSHMLEERLGL"
TRIO = f">H heavy\n{ONE}\n>L\n{TWO}\n>x\n{ONE}\n"
DOCUMENTS = {
    "pdf": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n",
    "zip": b"PK\x03\x04\x14\x00",
    "page": b"<!DOCTYPE html><html><body>404</body></html>",
}
TEXTS = {
    # Queries
    "q.fasta": ">a\nMKTAYIAK\n",
    "one.fasta": f">one\n{ONE}\n",
    "two.fasta": f">one first\n{ONE}\n>two\n{TWO}\n",
    "trio.fasta": TRIO,
    "pair.fasta": f">a\n{ONE}:{TWO}\n",
    "same.fasta": f">H\n{ONE}\n>H\n{TWO}\n",
    "no_chain.fasta": f">a\n{ONE}:\n",
    "twice.fasta": ">a\nMKT\n>A\nGSH\n",
    "latin.fasta": b">a\nMKT\xff\n",
    "digit.fasta": ">a\nMK7T\n",
    "blank.fasta": ">a\n\n",
    "empty.fasta": "",
    "bare.fasta": "MKT\n",
    "dna.fasta": ">a\nACGTACGTACGTACGT\n",
    **{f"{name}_name.fasta": f">{name}\n{ONE}\n" for name in ("alignments", "records", "report.html")},
    **{f"{name}_name.fasta": f">{name}\n{ONE}\n" for name in ("Summary.json", "Cite.bibtex")},
    **{f"{kind}.{end}": data for kind, data in DOCUMENTS.items() for end in ("fasta", "a3m", "csv")},
    # Alignments
    "short.a3m": ">a\nMKTAYIAK\n>b\nMKTA\n",
    "other.a3m": ">a\nMKTAYIAV\n",
    "stranger.a3m": ">b\nMKVWW\n>r\nMKVWA\n",
    "broken.a3m": b"\x1f\x8bbroken",
    "blank.a3m": "\n\n",
    "bare.sto": "# STOCKHOLM 1.0\n//\n",
    # Structures and hits
    "empty.cif": "",
    "bare.cif": "data_bare\n_entry.id bare\n",
    "bare.pdb": "HEADER\nEND\n",
    "page.cif": "<html>404</html>",
    "a.hhr": "no hits at all",
    "Q.a3m": f">1abc_B/1-11\n{TWO}\n",
    # Parameters
    "p.npz": "parameters",
    "page.npz": DOCUMENTS["page"],
    "nonsense.npz": "nonsense",
    "nonsense.safetensors": "nonsense",
    "short.safetensors": b"\0" * 5,
    # Settings and tables
    "wrong.toml": "[model]\nc_mm = 3\n",
    "right.toml": "[model]\nc_m = 8\n",
    "cluster.toml": "",
    # Databases to search
    "bad/empty.fa": b"",
    "bad/text.fa": b"no fasta\n",
    "bad/dna.fa": b">a\nACGTACGTAC\n>b\nGGTTACGTAC\n",
    "bad/gap.fa": b">a\nMKV\n>b x\nMK-V\n",
    "bad/digit.fa": b">a\nMKV\n>b\nMK1V\n",
    "bad/nameless.fa": b">a\nMKV\n>\nMKV\n",
    "bad/tab.fa": b">a\nMKV\n>\v x\nMKV\n",
    "bad/latin.fa": b">a\nMKV\n>b \xff\nMKV\n",
    "bad/names.fa": b">a\n>b\n",
    "bad/cut.fa": gzip.compress(b">a\nMKVWL\n" * 99, mtime=0)[:-20],
    "same_names.fasta": ">a\nMKV\n>A other\nMKW\n",
    # Folders with something in them, and a file in the place of a folder
    "taken/file": "mine",
    "file": "mine",
    # Modules with models to time
    "mine_to_bench.py": MINE,
    "broken_bench.py": "import nowhere_to_be_found\n",
}


def write_inputs(folder: Path) -> None:
    """Write all input files of the tables into an empty folder."""
    for name, content in TEXTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    for name in ("pipe.x", "piped/store.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        os.mkfifo(folder / name)
    (folder / "empty").mkdir()
    write_structures(folder)
    write_params(folder)
    for name in ("helices.store", "no_shard.store", "no_index.store"):
        make_store(folder / name)
    (folder / "no_shard.store/shard-00000.wfs").unlink()
    (folder / "no_index.store/store.json").unlink()
    queries(folder / "queries.fasta", 0, 1, 2)
    database(folder / "db.fasta", 0, 1, 2)


def write_structures(folder: Path) -> None:
    """Write a good structure, damaged copies of it, entries for templates, and the inputs of `pack`."""
    text = write_mmcif("one", [chain("A", "MKTAYIAKQRQISFVKSHFS")], method="X-RAY DIFFRACTION", resolution=2.0)
    atoms = (line for line in text.splitlines(keepends=True) if not line.startswith("ATOM") or " CA " in line)
    for name, content in {
        "one.cif": text,
        "truncated.cif": text[: len(text) * 2 // 3],
        "no_atoms.cif": text[: text.index("loop_\n_atom_site.")],
        "ca_alone.cif": "".join(atoms),
        "no_number.cif": re.sub(r"(ATOM 5 .* \? )\S+", r"\1nan", text),
    }.items():
        (folder / name).write_text(content)
    for name in ("mmcif", "twice", "other"):
        (folder / name).mkdir()
    write_entry(folder / "mmcif/1abc.cif", {"A": ONE[:9] + "WWW" + ONE[12:], "B": TWO}, "2010-01-01")
    write_entry(folder / "dimer.cif", {"A": ONE, "B": TWO}, "2020-01-01")
    for name in ("twice/dimer.cif", "twice/dimer.pdb", "other/another.cif"):
        write_entry(folder / name, {"A": ONE, "B": TWO}, "2020-01-01")
    write_entry(folder / "target.cif", {"A": ONE}, "2020-01-01")
    write_entry(folder / "shorter.cif", {"A": ONE, "B": TWO[1:]}, "2020-01-01")
    write_entry(folder / "renamed.cif", {"A": ONE, "X": TWO}, "2020-01-01")
    make_files(folder)


def write_params(folder: Path) -> None:
    """Write parameters of monomers and multimers, good and damaged."""
    without = TemplateConfig(enabled=False)
    models = {
        "tiny": tiny_model(templates=without),
        "template": tiny_model(),
        "multimer": tiny_multimer(),
        "headless": multimer(0, heads=HeadsConfig(plddt_c=8, msa_classes=22)),
    }
    for name, model in models.items():
        save_params(folder / f"{name}.safetensors", model)
    whole = (folder / "template.safetensors").read_bytes()
    (folder / "half.safetensors").write_bytes(whole[: len(whole) // 2])
    np.savez(folder / "wrong.npz", weights=np.zeros((3, 3)))
    np.savez(folder / "objects.npz", weights=np.array([{}], dtype=object))
    assert tiny_config().recycles == 1
