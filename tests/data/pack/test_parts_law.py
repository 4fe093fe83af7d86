"""Check that N merged parts equal one run byte for byte, whatever the names of the alignments."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.pack.pack_inputs import ONE, TWO, chain, contents, packed, structure
from warpfold.bulk import JobPart
from warpfold.data.formats.alignment import write_fasta
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import merge
from warpfold.data.pack.part import part_path

THREE = ONE[::-1]
QUERIES = [ONE, TWO, THREE, "MM" + ONE, TWO[3:], "C" + THREE[1:], "W" * 30, "AC1EF"]
# Names of chains and entries, other words, and hashes.
STEMS = ["1one_A", "1one_B", "1one", "1two_A", "1two", "2dup_A", "x", "0f3a9c", "bfd_hits", "uniref90_hits"]
FOLDERS = ["", "1one_A/", "1two/", "0f3a9c/", "z/"]


def write_inputs(folder: Path, draw: st.DataObject) -> None:
    """Write structures that share sequences and a name, and alignments of any name, format and content."""
    here = folder / "structures"
    structure(here / "1one.cif", chain("A", ONE), chain("B", TWO), chain("C", ONE, shift=50.0))
    structure(here / "1two.cif", chain("A", "GGGGG" + TWO))
    structure(here / "2dup.cif", chain("A", THREE))
    structure(here / "again/2dup.cif", chain("A", THREE, shift=9.0), chain("B", ONE))
    structure(here / "3non.cif", chain("A", "GSEEKLLTHAVFDNPRSQWYIMCKEALGTD"))
    (here / "bad.cif").write_text("data_x\n")
    (folder / "msas").mkdir()
    for _ in range(draw.draw(st.integers(1, 9), "alignments")):
        path = folder / "msas" / (draw.draw(st.sampled_from(FOLDERS)) + draw.draw(st.sampled_from(STEMS)))
        query, other = (draw.draw(st.sampled_from(QUERIES)) for _ in range(2))
        path.parent.mkdir(exist_ok=True)
        kind = draw.draw(st.sampled_from(["a3m", "sto", "complex", "empty"]))
        if kind == "a3m":
            path.with_name(f"{path.name}.a3m").write_text(write_fasta([("q", query), ("r", query[::-1])]))
        elif kind == "sto":
            text = f"# STOCKHOLM 1.0\n\nq {query}\nr {query[::-1]}\n//\n"
            path.with_name(f"{path.name}.sto").write_text(text)
        elif kind == "complex":
            text = f"#{len(query)},{len(other)}\t1,1\n>101\t102\n{query}{other}\n"
            path.with_name(f"{path.name}.a3m").write_text(text)
        else:
            path.with_name(f"{path.name}.a3m").write_text("")


@pytest.mark.parametrize("options", [PackOptions(), PackOptions(assemblies=True)])
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_merged_parts_are_one_run(
    tmp_path_factory: pytest.TempPathFactory, options: PackOptions, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("law")
    write_inputs(folder, data)
    packed(folder, "one", options=options)
    count = data.draw(st.integers(1, 5), "parts")
    numbers = data.draw(st.permutations(range(1, count + 1)), "order")
    for number in numbers:
        packed(folder, "parts", options=options, part=JobPart(number, count))
    paths = [part_path(folder / "parts", JobPart(number, count)) for number in numbers]
    merge(data.draw(st.permutations(paths)), folder / "parts")
    assert contents(folder / "parts") == contents(folder / "one")
    shutil.rmtree(folder)
