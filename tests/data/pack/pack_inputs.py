"""Write small structures and alignments to pack, good and bad."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warpfold import cli
from warpfold.bulk import JobPart
from warpfold.data.formats.alignment import write_fasta
from warpfold.data.pack.pack import pack
from warpfold.data.pack.part import PartWriter, part_path
from warpfold.data.pack.report import PackReport
from warpfold.data.structure.chain import Chain
from warpfold.data.structure.write import write_mmcif
from warpfold.geometry.residue import ATOM37_MASK, RESTYPE_ORDER

ONE = "MKVLAAGIVGLCAKWDERSTFYHNQPMEAL"
TWO = "GSWYQNTRAEEDIKHFMPVCLLGTASWNDR"


def chain(name: str, sequence: str, resolved: int | None = None, shift: float = 0.0) -> Chain:
    """Return a chain of random coordinates, 4 angstrom between residues."""
    n = len(sequence)
    steps = np.arange(n)[:, None, None] * np.array([4.0, 0, 0])
    positions = steps + shift + np.random.default_rng(0).normal(size=(n, 37, 3)).round(3)
    mask = np.stack([ATOM37_MASK[RESTYPE_ORDER[letter]] for letter in sequence])
    mask[n if resolved is None else resolved :] = 0
    positions = (positions * mask[..., None]).astype(np.float32)
    return Chain(name, sequence, positions, mask.astype(np.float32), np.arange(n), tuple(str(i + 1) for i in range(n)))


def structure(path: Path, *chains: Chain, resolution: float | None = 2.0, released: str | None = None) -> Path:
    """Write an mmCIF file, named after its entry."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = write_mmcif(path.name.split(".")[0], chains, resolution=resolution)
    if released:
        text += f"_pdbx_audit_revision_history.revision_date {released}\n#\n"
    path.write_text(text)
    return path


def alignment(path: Path, *rows: str) -> Path:
    """Write an A3M file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(write_fasta([(str(i), row) for i, row in enumerate(rows)]))
    return path


def make_files(folder: Path) -> Path:
    """Write `structures` and `msas` into `folder`, with one case of everything that is kept or dropped."""
    structures, msas = folder / "structures", folder / "msas"
    structure(structures / "1one.cif", chain("A", ONE), chain("B", TWO), chain("C", ONE, shift=50.0))
    structure(structures / "deep/1two.cif", chain("A", "GGGGG" + TWO))
    structure(structures / "1mut.cif", chain("A", "C" + ONE[1:]))
    structure(structures / "1non.cif", chain("A", ONE[::-1]))
    structure(structures / "1low.cif", chain("A", ONE), resolution=9.5)
    structure(structures / "1pol.cif", chain("A", "A" * 28 + "GG"))
    structure(structures / "1sho.cif", chain("A", ONE[:5]))
    structure(structures / "1gap.cif", chain("A", ONE, resolved=3))
    (structures / "bad.cif").write_text("data_x\n")
    (structures / "1one.cif.gz").write_bytes(gzip.compress((structures / "1one.cif").read_bytes(), mtime=0))
    (structures / "notes.txt").write_text("not a structure")
    alignment(msas / "a.a3m", ONE, ONE[:15] + "-" * 15, "A" * 30)
    alignment(msas / "b.a3m", "MM" + ONE + "KK", "C" * 34)
    alignment(msas / "1two/hits.a3m", TWO, TWO[::-1])
    alignment(msas / "1non_A.a3m", "WWWWWWWWWW" + TWO[:10], "A" * 20)
    alignment(msas / "c.a3m", "LLLLLPPPPPLLLLLPPPPP")
    (msas / "bad.a3m").write_text(">q\nAC1EF\n")
    (msas / "empty.a3m").write_text("")
    return folder


def packed(files: Path, name: str = "store", **options: Any) -> PackReport:
    """Pack the files of `make_files` into the store `name` next to them."""
    return pack([files / "structures"], [files / "msas"], files / name, **options)


def contents(store: Path) -> dict[str, bytes]:
    """Return the contents of every file of a store."""
    return {file.name: file.read_bytes() for file in store.iterdir()}


def stopped(files: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Path:
    """Return the unfinished part of a run that was stopped just before its end."""

    def interrupt(_: PartWriter) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PartWriter, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            packed(files, **options)
    return draft_of(files)


def draft_of(files: Path) -> Path:
    """Return the folder of the unfinished part of a store."""
    path = part_path(files / "store", JobPart(1, 1))
    return path.with_name(f"{path.name}.partial")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run `warpfold ARGUMENTS`, and return exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def refused(result: tuple[int, str, str]) -> str:
    """Check that a run refused its input, and return the line of the error."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err
