"""Test that training excludes relatives of test and validation entries in all stores.

Relatives include fragments, fusions and tandem repeats.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from Bio.Align import PairwiseAligner, substitution_matrices

import warpfold
from tests.training.runs import helix
from warpfold.data.load.order import Source
from warpfold.data.similar.pairwise import rost_identity
from warpfold.data.similar.relatives import find_relatives
from warpfold.data.store.store import Store, StoreWriter, pack_record
from warpfold.data.store.stored_example import StoredExample, example_arrays, example_notes
from warpfold.data.synthetic.folder import generate
from warpfold.errors import UserError
from warpfold.finetuning.split import Split, make_split, read_split, without_relatives

LETTERS = "ARNDCQEGHILKMFPSTWYV"


def drawn(rng: np.random.Generator, length: int) -> str:
    return "".join(rng.choice(list(LETTERS), length))


def mutated(rng: np.random.Generator, sequence: str, identity: float) -> str:
    """Replace random letters, so that about a fraction `identity` of them stays."""
    return "".join(letter if rng.random() < identity else rng.choice(list(LETTERS)) for letter in sequence)


def is_related(one: str, other: str, identity: float = 0.3) -> bool:
    """Align two chains with Biopython, and compare the whole alignment with the limits."""
    aligner = PairwiseAligner(mode="local", open_gap_score=-12, extend_gap_score=-1)
    aligner.substitution_matrix = substitution_matrices.load("BLOSUM62")
    if aligner.score(one, other) <= 0:
        return False
    counts = aligner.align(one, other)[0].counts()
    pairs, same = counts.identities + counts.mismatches, counts.identities
    half = pairs >= 0.5 * min(len(one), len(other))
    return half and same >= max(identity, rost_identity(pairs)) * pairs


def constructs(rng: np.random.Generator, proteins: int) -> dict[str, str]:
    """Generate proteins, each complete and as another construct: a fragment, fusion, tandem repeat or homologue."""
    found: dict[str, str] = {}
    for number in range(proteins):
        whole = drawn(rng, int(rng.integers(40, 90)))
        kinds = {
            "fragment": whole[: 3 * len(whole) // 4],
            "fusion": drawn(rng, 60) + whole + drawn(rng, 50),
            "tandem": whole + "GSGSGS" + whole,
            "homologue": mutated(rng, whole, 0.5),
        }
        kind = list(kinds)[number % len(kinds)]
        found |= {f"p{number:02d}_A": whole, f"p{number:02d}{kind}_A": kinds[kind]}
    return found


def store_of(path: Path, sequences: dict[str, str]) -> Store:
    """Pack helices with these sequences, each in a separate cluster."""
    with StoreWriter(path) as writer:
        for name, sequence in sequences.items():
            raw = helix(name, len(sequence), seed=1, sequence=sequence)
            meta = {"length": len(sequence), "depth": len(raw.msa), "cluster": name}
            writer.add(name, pack_record(example_arrays(raw), example_notes(raw)), meta)
        writer.finish()
    return Store(path)


def leaks(store: Store, trained: Sequence[str], judging: Sequence[tuple[Store, str]]) -> list[tuple[str, str]]:
    """Find all related pairs of a training entry and a test or validation entry, by aligning every pair."""
    return [
        (key, other)
        for key in trained
        for where, other in judging
        if is_related(StoredExample(store, key).sequence, StoredExample(where, other).sequence)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_no_construct_of_a_held_out_protein_is_in_training(seed: int, tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", constructs(np.random.default_rng(seed), 12))
    split = make_split(store, seed)
    assert sorted(key for part in split.parts.values() for key in part) == sorted(store.keys)
    test, validation = [(store, key) for key in split.test], [(store, key) for key in split.validation]
    assert leaks(store, split.training, [*test, *validation]) == []
    assert leaks(store, split.validation, test) == []


def test_relatives_are_left_out_of_a_given_split(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", constructs(np.random.default_rng(5), 12))
    keys = list(store.keys)
    given = Split(by="cluster", training=tuple(keys[4::2]), validation=(keys[2], keys[5]), test=(keys[0], keys[7]))
    given.write(tmp_path / "split.toml")
    split = without_relatives(read_split(tmp_path / "split.toml", store), store, 0.3)
    test, validation = [(store, key) for key in split.test], [(store, key) for key in split.validation]
    assert split.test == given.test
    assert leaks(store, split.training, [*test, *validation]) == []
    assert set(given.training) - set(split.training) == {keys[4], keys[6]}
    all_related = Split(by="cluster", training=(keys[1],), validation=(keys[2],), test=(keys[0],))
    with pytest.raises(UserError, match="every training entry has relatives"):
        without_relatives(all_related, store, 0.3)


def test_many_sequences_are_searched_as_few_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    known = list(constructs(rng, 24).values())
    others = [*known, *(drawn(rng, 100) for _ in range(200))]
    exhaustive = find_relatives(known, others)
    monkeypatch.setattr("warpfold.data.similar.relatives.MAX_CELLS", 0)
    assert find_relatives(known, others) == exhaustive
    for query, related in zip(known, exhaustive):
        assert related >= {n for n, other in enumerate(others) if is_related(query, other)}


def test_few_clusters_are_said_with_the_largest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(3)
    whole = drawn(rng, 120)
    family = {f"family{n}_A": whole[: 120 - 6 * n] for n in range(8)}
    store = store_of(tmp_path / "store", {**family, **{f"other{n}_A": drawn(rng, 60) for n in range(4)}})
    split = make_split(store, 0)
    assert "5 clusters of related proteins" in caplog.text
    assert "family0_A, has 8 of the 12 structures" in caplog.text
    assert set(family) <= set(split.training)


def used(run: Path) -> tuple[set[str], set[str]]:
    """Read from the log the entries that a run trained on, and those that it validated."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = {name for row in rows if row["kind"] == "step" for name in row["examples"]}
    return trained, {name for row in rows if row["kind"] == "validation" for name in row["examples"]}


@pytest.fixture
def two_stores(tmp_path: Path) -> tuple[Store, Store, dict[str, Any]]:
    """Write a store of proteins and a general store with constructs of them.  Returns both, and a run's settings."""
    rng = np.random.default_rng(8)
    own = {f"own{n}_A": drawn(rng, 50) for n in range(6)}
    fusions = {f"fusion{n}_A": drawn(rng, 40) + own[f"own{n}_A"][:40] for n in range(6)}
    general = {**fusions, **{f"general{n}_A": drawn(rng, 60) for n in range(4)}}
    small = {"train.steps": 12, "train.order": "uniform", "train.validate_every": 6, "data.crop": 16, "data.max_msa": 3}
    small |= {"data.max_extra": 4, "train.workers": 0, "optim.accumulate": 2, "plan.precision": "fp32"}
    small |= {"train.validation": ["own1_A"], "train.test": ["own0_A"], "train.validation_share": 1.0}
    return store_of(tmp_path / "own", own), store_of(tmp_path / "general", general), small


def test_no_store_of_a_run_has_relatives_of_its_test(two_stores: Any, tmp_path: Path) -> None:
    own, general, small = two_stores
    sources = [Source(own), Source(general)]
    warpfold.train("tiny", sources, tmp_path / "run", device="cpu", set=small)
    trained, validated = used(tmp_path / "run")
    assert validated == {"own1_A"}
    assert {"own:own2_A", "general:fusion2_A"} & trained
    assert not trained & {"own:own0_A", "own:own1_A", "general:fusion0_A", "general:fusion1_A"}


def test_only_the_listed_entries_are_trained_on(two_stores: Any, tmp_path: Path) -> None:
    own, _, small = two_stores
    source = Source(own, ["own0_A", "own1_A", "own3_A"])
    warpfold.train("tiny", [source], tmp_path / "run", device="cpu", set={**small, "train.steps": 4})
    assert used(tmp_path / "run")[0] == {"own3_A"}


def test_finetune_rehearses_no_relatives_and_states_a_raised_limit(tiny_params: Path, tmp_path: Path) -> None:
    """The general store has a fusion of every protein, so the rehearsed entries depend on the split."""
    generate(tmp_path / "proteins", 14, 5, max_length=32)
    warpfold.pack(tmp_path / "proteins/mmcif", tmp_path / "proteins/msas", tmp_path / "packed")
    rng, packed = np.random.default_rng(1), Store(tmp_path / "packed")
    fusions = {
        f"fusion{n}_A": drawn(rng, 20) + StoredExample(packed, key).sequence for n, key in enumerate(packed.keys)
    }
    store_of(tmp_path / "general", {**fusions, **{f"general{n}_A": drawn(rng, 50) for n in range(6)}})
    small = {"data.crop": 16, "data.max_msa": 4, "data.max_extra": 4, "optim.accumulate": 1, "plan.precision": "fp32"}
    result = warpfold.finetune(
        structures=tmp_path / "proteins/mmcif",
        init=tiny_params,
        out=tmp_path / "tuned",
        rehearse=f"{tmp_path / 'general'}=0.6",
        split_identity=0.5,
        steps=30,
        set=small,
        device="cpu",
    )
    store, general = Store(tmp_path / "tuned/store"), Store(tmp_path / "general")
    test, validation = (result["settings"]["train"][name] for name in ("test", "validation"))
    judging = [(store, key) for key in (*test, *validation) if key in store]
    names = used(tmp_path / "tuned/run")[0]
    rehearsed = [name.partition(":")[2] for name in names if name.startswith("general:")]
    assert rehearsed
    assert leaks(general, rehearsed, judging) == []
    assert result["left_out"]["rehearsal"] >= len(judging)
    stated = "Relatives up to 50 % identity are in training."
    for page in ("card.md", "report.html"):
        assert stated in (tmp_path / "tuned" / page).read_text()
