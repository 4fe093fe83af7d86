"""Cluster similar sequences, and no others, in any order and with any number of workers; read cluster files."""

import gzip
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

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


def shared_words(sequences: Sequence[str], query: str, count: int) -> list[float]:
    """Compute what `_WordIndex` maximises: the weights of the words that the query shares with each sequence.

    Words are three letters without X, in two shapes. A word that occurs n times in all sequences has the weight 1 / n,
    or less if n is below the mean of all 8000 words. Diagonals are counted in bands of 8, and two neighbouring bands
    together. Sequences that the query cannot cover have no words.
    """
    totals = np.zeros((count, 2 * max(map(len, sequences)) // 8 + 3))
    for offset in (2, 3):

        def words(sequence: str, offset: int = offset) -> list[tuple[str, int]]:
            found = [(sequence[at : at + 2] + sequence[at + offset], at) for at in range(len(sequence) - offset)]
            return [(word, at) for word, at in found if "X" not in word]

        all_words = [words(sequence) for sequence in sequences]
        counts = Counter(word for found in all_words for word, _ in found)
        mean = sum(counts.values()) / 8000
        starts: dict[str, list[int]] = {}
        for word, start in words(query):
            starts.setdefault(word, []).append(start)
        for n, sequence in enumerate(sequences[:count]):
            for word, at in all_words[n]:
                for start in starts.get(word, ()):
                    totals[n, (len(sequence) + at - start) // 8] += 1 / max(counts[word], mean)
    best = (totals[:, :-1] + totals[:, 1:]).max(1)
    return [0.0 if 0.8 * len(sequence) > len(query) else float(score) for sequence, score in zip(sequences, best)]


def crowd(seed: int) -> tuple[list[str], list[str]]:
    """Return sequences by decreasing length, and shorter ones that share words with some of them."""
    rng = np.random.default_rng(seed)
    ancestors = [random_sequence(rng, 100), random_sequence(rng, 86), "".join(rng.choice([*"ACX"], 97))]
    members = [mutated(rng, ancestor, 0.6, gap=int(gap)) for ancestor in ancestors for gap in rng.integers(0, 20, 4)]
    members += [ancestors[0][:40] + "X" * 9 + ancestors[0][40:], TAG + random_sequence(rng, 70), "ACD", ""]
    queries = [TAG + ancestors[1][:70], ancestors[0][5:85], ancestors[2][:70], "AC", "X" * 60, ancestors[0][:68]]
    return sorted([*ancestors, *members], key=len, reverse=True), queries


@pytest.mark.parametrize("seed", range(3))
def test_candidates_share_most_words_on_neighbouring_diagonals(seed: int) -> None:
    sequences, queries = crowd(seed)
    index = clusters._WordIndex(sequences)
    for query in queries:
        for count in (sum(len(sequence) >= len(query) for sequence in sequences), 3, 1, 0):
            scores = np.array(shared_words(sequences, query, count))
            found = index.nearest(query, count)
            assert found.dtype == np.int64
            assert sorted(found.tolist()) == np.flatnonzero(scores).tolist()
            assert (np.diff(scores[found]) <= 1e-12).all()
    assert clusters._WordIndex([]).nearest("ACD", 0).tolist() == []


def test_words_of_a_sequence() -> None:
    """They are numbered by their letters in the order of residue types, and start anywhere but at X."""
    letters = np.array([3, 0, 19, 20, 1, 2, 5, 19], np.uint8)
    for offsets, starts in (((0, 1, 2), [0, 4, 5]), ((0, 1, 3), [1, 4]), ((0, 2, 7), [0])):
        words, at = clusters._list_words(letters, offsets)
        numbers = [sum(int(letters[n + offset]) * base for offset, base in zip(offsets, (400, 20, 1))) for n in starts]
        assert (words.tolist(), at.tolist()) == (numbers, starts)
    assert [array.tolist() for array in clusters._list_words(letters[:2], (0, 1, 2))] == [[], []]


def test_equal_candidates_keep_their_order_and_the_limit_of_coverage_is_exact() -> None:
    sequence = random_sequence(np.random.default_rng(3), 100)
    index = clusters._WordIndex([sequence + "W", sequence, sequence, sequence[:90], sequence[:80]])
    assert index.nearest(sequence[:80], 5).tolist() == [1, 2, 3, 4]


def test_common_words_weigh_less_than_rare_ones_but_no_word_more_than_the_mean() -> None:
    """Of more than 8000 words, the mean count is above 1."""
    rng = np.random.default_rng(4)
    sequences = [random_sequence(rng, 300) for _ in range(60)]
    query = sequences[0][:100] + sequences[1][100:180] + sequences[2][180:250]
    index = clusters._WordIndex(sequences)
    scores = np.array(shared_words(sequences, query, 60))
    found = index.nearest(query, 60)
    assert found[:3].tolist() == [0, 1, 2]
    assert (np.diff(scores[found]) <= 1e-12).all()
    assert sorted(found.tolist()) == np.flatnonzero(scores).tolist()


def test_no_more_than_twenty_candidates_are_aligned() -> None:
    rng = np.random.default_rng(5)
    sequence = random_sequence(rng, 50)
    others = [random_sequence(rng, 50) for _ in range(20)]
    assert clusters._first_similar([*others[:19], sequence, "W"], sequence, 0.4) == sequence
    assert clusters._first_similar([*others, sequence], sequence, 0.4) is None


def test_later_blocks_join_the_representatives_that_they_cover(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 residues cover 0.8 of 100, and 64 cover more than 0.8 of 79."""
    sequence = random_sequence(np.random.default_rng(6), 100)
    cuts = [sequence[:length] for length in (100, 90, 80, 79, 64, 63)]
    for block in (1, 2, 4096):
        monkeypatch.setattr(clusters, "BLOCK", block)
        assert cluster_sequences(cuts) == [0, 0, 0, 3, 3, 5]
        assert cluster_sequences(cuts[::-1]) == [0, 2, 2, 5, 5, 5]


@pytest.mark.parametrize("pairs", [[(1, 0), (2, 1)], [(0, 0), (0, 0)], [(1, 0), (1, 1), (1, 0)], [(0, 0), (-1, 1)]])
def test_every_sequence_needs_one_leader_that_leads_itself(
    pairs: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """pairs: leader and member of the first two of eleven sequences in the table of MMseqs2."""
    rng = np.random.default_rng(7)
    sequences = [random_sequence(rng, length) for length in range(40, 29, -1)]

    def run(command: list[str]) -> str:
        if command[1] == "createtsv":
            table = [*pairs, *((n, n) for n in range(2, 11))]
            Path(command[5]).write_text("".join(f"{leader}\t{member}\n" for leader, member in table))
        return ""

    monkeypatch.setattr(clusters, "run_program", run)
    with pytest.raises(UserError) as error:
        cluster_sequences(sequences, program="MMseqs2")
    assert str(error.value) == (
        "`mmseqs cluster`: its table does not put each sequence into one cluster. Install another version of MMseqs2 "
        "(14 works), or pass a file with --clusters."
    )


def test_a_failure_of_mmseqs2_names_the_free_space(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str]) -> str:
        raise UserError("`mmseqs` failed")

    monkeypatch.setattr(clusters, "run_program", fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=9_960_000_000))
    with pytest.raises(UserError) as error:
        cluster_sequences(["ACDEFGH"], program="MMseqs2")
    assert str(error.value) == (
        f"`mmseqs` failed. It needs memory, and space in {tempfile.gettempdir()} (10.0 GB are free): set TMPDIR to a "
        "folder with more space, and repeat the command."
    )


def test_one_program_clusters_up_to_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of MMseqs2 have the definitions of this module."""
    handed_over(monkeypatch)
    rng = np.random.default_rng(7)
    sequences = [random_sequence(rng, length) for length in range(30, 41)]
    commands: list[list[str]] = []

    def run(command: list[str]) -> str:
        commands.append(command)
        if command[1] == "createtsv":
            pairs = [(0, 0), (0, 1), *((n, n) for n in range(2, len(sequences)))]
            Path(command[5]).write_text("".join(f"{leader}\t{member}\n" for leader, member in pairs))
        if command[1] == "createdb":
            commands.append([Path(command[2]).read_text()])
        return "15-abc\n"

    monkeypatch.setattr(clusters, "run_program", run)
    monkeypatch.setattr(shutil, "which", lambda _: "/bin/mmseqs")
    assert clustering_program(sequences[:10] * 2) == ""
    assert commands == []
    assert clustering_program(sequences) == "MMseqs2 15-abc"
    # The longest is the first in the table, and the sequence before it in the list joins it.
    assert cluster_sequences(sequences, 0.3) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 10]
    assert cluster_sequences(sequences, program="MMseqs2 15-abc", threads=3) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 10]
    assert cluster_sequences(sequences, program="") == list(range(11))
    assert commands[:2] == [["mmseqs", "version"]] * 2
    create, [fasta], cluster, table = commands[2:6]
    folder = str(Path(create[2]).parent)
    by_length = enumerate(reversed(sequences))
    assert fasta == "".join(f">{number}\n{sequence}\n" for number, sequence in by_length)
    names = [f"{folder}/{name}" for name in ("fasta", "database", "clusters", "work", "tsv")]
    assert create == ["mmseqs", "createdb", *names[:2], "--dbtype", "1", "--shuffle", "0", "-v", "1"]
    options = "--seq-id-mode 1 -c 0.8 --cov-mode 0 --alignment-mode 3 --cluster-mode 2 --cluster-reassign 1 --split 1"
    limits = ["--min-seq-id", "0.3", "--threads", "1", "-v", "1"]
    assert cluster == ["mmseqs", "cluster", *names[1:4], *options.split(), *limits]
    assert table == ["mmseqs", "createtsv", names[1], names[1], names[2], names[4], "-v", "1"]
    assert commands[8][-6:] == ["--min-seq-id", "0.4", "--threads", "3", "-v", "1"]
    assert not Path(folder).exists()


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


def test_files_of_clusters_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "clusters.txt"
    path.write_text("1ABC_A 2DEF_B\n3GHI_C\n\n4JKL_A 2def_B\n")
    with pytest.raises(UserError) as error:
        read_clusters(path, ["1abc_A"])
    assert str(error.value) == f"{path}: line 4: 2def_B is in two clusters. Remove it from one."
    path.write_text("1ABC_A 2DEF_B 1abc_A\nplain\n")
    assert read_clusters(path, ["2def_B", "PLAIN", "plain"]) == {"2def_B": "1ABC_A", "plain": "plain"}
    assert read_clusters(path, []) == {}
    with pytest.raises(UserError) as error:
        read_clusters(path, ["5mno_A", "6pqr_A"], {"5mno_A": "5mno_1"})
    assert str(error.value) == (
        f"{path}: names none of the 2 chains; its names are like 1abc_A, the chains' like 5mno_A. Pass a file with "
        "names of chains, or none: pack can compute clusters."
    )


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
