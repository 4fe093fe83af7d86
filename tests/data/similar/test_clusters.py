"""Cluster similar sequences, and no others, in any order and with any number of workers; read cluster files."""

import gzip
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.search.test_search_programs import install
from warpfold.data.similar import clusters
from warpfold.data.similar.clusters import cluster_sequences, clustering_program, read_clusters
from warpfold.data.similar.pairwise import rost_identity, similar
from warpfold.errors import UserError

LETTERS = np.array(list("ARNDCQEGHILKMFPSTWYV"))
TAG = "MGSSHHHHHHSSGLVPRGSH"


def random_sequence(rng: np.random.Generator, length: int) -> str:
    return "".join(rng.choice(LETTERS, length))


def mutated(rng: np.random.Generator, sequence: str, identity: float, gap: int = 0) -> str:
    """Keep a fraction `identity` of the residues, exchange the others, and cut `gap` residues out of the middle."""
    letters = np.array(list(sequence))
    places = rng.permutation(len(letters))[: round((1 - identity) * len(letters))]
    old = (letters[places][:, None] == LETTERS).argmax(1)
    letters[places] = LETTERS[(old + rng.integers(1, 20, len(places))) % 20]
    middle = len(letters) // 2
    return "".join(np.delete(letters, np.s_[middle : middle + gap]))


def families(seed: int = 0, lengths: tuple[int, ...] = (60, 120, 121, 300)) -> list[str]:
    """Return an ancestor of each length and its descendants of 95 to 70 % identity, one of them with a gap."""
    rng = np.random.default_rng(seed)
    members = []
    for length in lengths:
        ancestor = random_sequence(rng, length)
        members += [ancestor, *(mutated(rng, ancestor, identity) for identity in (0.95, 0.85, 0.7))]
        members.append(mutated(rng, ancestor, 0.8, gap=length // 10))
    return members


def named(sequences: list[str]) -> dict[str, str]:
    """Return sequence -> the sequence that represents it."""
    clusters = cluster_sequences(sequences)
    return {sequence: sequences[index] for sequence, index in zip(sequences, clusters)}


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000))
def test_neither_order_nor_copies_matter(seed: int) -> None:
    sequences = families(seed % 7, lengths=(60, 61, 80))
    rng = np.random.default_rng(seed)
    shuffled = [sequences[i] for i in rng.permutation(len(sequences))] + [sequences[i] for i in rng.integers(0, 15, 4)]
    assert named(shuffled) == named(sequences)


def test_equal_sequences_are_represented_by_the_first_of_them() -> None:
    assert cluster_sequences(["ACDEFGHIKLMN", "WWWWWWWWWWWWWWW", "ACDEFGHIKLMN", "WWWWWWWWWWWWWWW"]) == [0, 1, 0, 1]
    assert cluster_sequences([]) == []


@pytest.mark.parametrize("executor", [False, True])
def test_blocks_and_workers_make_the_same_clusters(executor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = families()
    whole = cluster_sequences(sequences)
    assert [len(set(whole[start : start + 5])) for start in range(0, len(whole), 5)] == [1] * 4
    assert len(set(whole)) == 4
    monkeypatch.setattr(clusters, "BLOCK", 6)  # so that families span blocks and jobs
    monkeypatch.setattr(clusters, "JOB", 2)
    with ThreadPoolExecutor(3) as threads:
        assert cluster_sequences(sequences, executor=threads if executor else None) == whole


def test_every_member_is_similar_to_its_representative_and_no_shorter_one_leads() -> None:
    sequences = families(1)
    for index, leader in enumerate(cluster_sequences(sequences)):
        assert len(sequences[leader]) >= len(sequences[index])
        assert leader == index or similar(sequences[leader], sequences[index])


def test_the_threshold_is_where_it_says() -> None:
    rng = np.random.default_rng(2)
    ancestor = random_sequence(rng, 200)
    for identity, joined in ((0.45, True), (0.30, False)):
        assert similar(ancestor, mutated(rng, ancestor, identity)) is joined
    close = mutated(rng, ancestor, 0.6)
    assert similar(ancestor, close, min_identity=0.55)
    assert not similar(ancestor, close, min_identity=0.65)
    assert len(set(cluster_sequences([ancestor, close], min_identity=0.65))) == 2


def test_coverage_is_of_either_chain() -> None:
    sequence = random_sequence(np.random.default_rng(3), 100)
    assert cluster_sequences([sequence, sequence[:80]]) == [0, 0]
    assert cluster_sequences([sequence, sequence[:79]]) == [0, 1]


def test_short_chains_need_more_in_common() -> None:
    """Compare with Rost's curve: 100 % up to 11 residues, 19.5 % beyond 450."""
    assert rost_identity(11) == 1.0
    assert rost_identity(100) == pytest.approx(0.29, abs=0.001)
    assert rost_identity(450) == pytest.approx(rost_identity(451), abs=0.001)
    assert all(rost_identity(n) > rost_identity(n + 1) for n in range(11, 400))
    peptide = "ACDEFGHIKLMNPQRSTVWY"
    half = peptide[:10] + peptide[:9:-1]
    assert not similar(peptide, half)
    assert similar(peptide * 5, half * 5, min_identity=0.4)


def test_unknown_residues_equal_nothing() -> None:
    assert not similar("X" * 60, "X" * 60)
    rng = np.random.default_rng(4)
    sequence = random_sequence(rng, 100)
    assert similar(sequence, sequence[:50] + "X" * 50)
    assert not similar(sequence, sequence[:30] + "X" * 70)
    assert len(set(cluster_sequences(["X" * 50, "X" * 51, "*" * 50]))) == 3


def test_a_common_tag_hides_no_relative() -> None:
    rng = np.random.default_rng(5)
    ancestor = random_sequence(rng, 150)
    crowd = [TAG + random_sequence(rng, 150) for _ in range(60)]
    sequences = [*crowd, TAG + ancestor, TAG + mutated(rng, ancestor, 0.45)]
    clusters = cluster_sequences(sequences)
    assert clusters[60] == clusters[61]
    assert len(set(clusters)) == 61


ENTITIES = {"1abc_A": "1abc_1", "1abc_B": "1abc_1", "1abc_1": "1abc_2"}


@pytest.mark.parametrize(
    ("text", "entities", "found"),
    [
        ("1ABC_A 2def_B 3GHI_a\n4JKL_A\n\n", {}, "1abc_A:1ABC_A 2def_B:1ABC_A 3ghi_a:1ABC_A 4jkl_A:4JKL_A"),
        (
            "1abc_A\t1abc_A\n1abc_A\t2def_B\n4jkl_A\t4jkl_A\n",
            {},
            "1abc_A:1abc_A 2def_B:1abc_A 4jkl_A:4jkl_A",
        ),  # MMseqs2
        (
            "1ABC_1 2DEF_2\n1ABC_2\n",
            ENTITIES,
            "1abc_A:1ABC_1 1abc_B:1ABC_1 1abc_1:1ABC_2",
        ),  # a chain called 1 is not an entity
    ],
)
def test_files_of_clusters(tmp_path: Path, text: str, entities: dict[str, str], found: str) -> None:
    (tmp_path / "clusters.txt.gz").write_bytes(gzip.compress(text.encode()))
    keys = list(entities) or ["1abc_A", "2def_B", "3ghi_A", "3ghi_a", "4jkl_A", "5mno_A"]
    assert read_clusters(tmp_path / "clusters.txt.gz", keys, entities) == dict(one.split(":") for one in found.split())


def handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let MMseqs2 cluster more than 10 sequences."""
    monkeypatch.setattr(clusters, "MAX_SEQUENCES", 10)


@pytest.mark.slow  # MMseqs2 allocates half a gigabyte for any input
@pytest.mark.skipif(shutil.which("mmseqs") is None, reason="MMseqs2 is not installed")
def test_many_sequences_are_clustered_by_mmseqs2_whatever_their_order_and_its_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sequences = families()
    here = named(sequences)
    handed_over(monkeypatch)
    assert clustering_program(sequences[:10] * 2) == ""
    assert clustering_program(sequences).startswith("MMseqs2 ")
    assert named(sequences) == here
    rng = np.random.default_rng(0)
    order = [*rng.permutation(len(sequences)), 3]
    clusters = cluster_sequences([sequences[i] for i in order], threads=2)
    assert {sequences[i]: sequences[order[j]] for i, j in zip(order, clusters)} == here


# A stand-in for MMseqs2: createdb copies the FASTA file, cluster joins no sequences, and createtsv writes one line per
# sequence.
MMSEQS = """
    if command == "version":
        print("14-test")
    elif command == "createdb":
        Path(rest[1]).write_text(Path(rest[0]).read_text())
    elif command == "cluster":
        pass
    elif command == "createtsv":
        names = Path(rest[0]).read_text().split()[::2]
        Path(rest[3]).write_text("".join(f"{name[1:]}\\t{name[1:]}\\n" for name in names))
"""


@pytest.mark.parametrize(
    ("there", "instead", "said"),
    [
        (None, "", "20 sequences: more than 10 need MMseqs2, .* is not on PATH. Install it .*--clusters.*identity 1"),
        (
            "pass",
            'sys.exit("Cannot close\\nPrefilter died")',
            "failed .1.: Cannot close / Prefilter died. .*: set TMPDIR",
        ),
        ("[::2]", "[2::2]", "does not put each sequence into one cluster"),
        ("[::2]", "[::2] * 2", "does not put each sequence into one cluster"),
        ("\\t{name[1:]}", "", "does not put each sequence into one cluster"),
        ("\\t{name[1:]}", "\\t{name[1:]}9", "does not put each sequence into one cluster"),
        ("{name[1:]}\\t", "0{int(name[1:]) ^ 1}\\t", "does not put each sequence into one cluster"),
    ],
)
def test_a_missing_or_failing_mmseqs2_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str | None, instead: str, said: str
) -> None:
    handed_over(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    if there is not None:
        assert there in MMSEQS
        install(tmp_path, "mmseqs", MMSEQS)
        sequences = families()
        assert cluster_sequences(sequences) == list(range(len(sequences)))
        install(tmp_path, "mmseqs", MMSEQS.replace(there, instead))
    with pytest.raises(UserError, match=said) as error:
        cluster_sequences(families())
    assert "\n" not in str(error.value)
