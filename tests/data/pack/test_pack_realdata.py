"""Real entries with several chains, packed as assemblies with their real alignments."""

from pathlib import Path

import numpy as np
import pytest

from warpfold.data.features.choose import SampleConfig
from warpfold.data.features.crop import ca_of
from warpfold.data.features.make import make_features
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.pack import pack
from warpfold.data.store.store import Store
from warpfold.data.store.stored_assembly import read_assembly

REALDATA = (Path(__file__).parents[3] / "../shared/realdata").resolve()
pytestmark = pytest.mark.skipif(not REALDATA.is_dir(), reason="../shared/realdata is not here")
ENTRIES = ("2hhb", "2q2k", "1hho", "1ncb", "3zee", "1a0a")
ALIGNMENTS = ("1a00_A", "HBB", "2q2k_A")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("realdata") / "store"
    files = [file for name in ENTRIES for file in (REALDATA / "mmcif").glob(f"{name}.cif*")]
    report = pack(files, [REALDATA / "msas" / name for name in ALIGNMENTS], path, PackOptions(assemblies=True))
    reasons = {entry.name: entry.reason for entry in report.entries}
    assert reasons["2hhb-assembly1"] == "without HEM: not a polymer; without PO4: not a polymer"
    assert reasons["1a0a-assembly1"].startswith("without C: polydeoxyribonucleotide; without D: poly")
    assert reasons["3zee-assembly1"] == "49 chains, more than 20"
    return Store(path)


def test_haemoglobin_is_two_copies_of_two_chains(store: Store) -> None:
    whole, half = read_assembly(store, "2hhb-assembly1"), read_assembly(store, "1hho-assembly1")
    assert whole.ids == ("A", "B", "C", "D")
    assert half.ids == ("A", "B", "A-2", "B-2")  # the other half by the crystal's symmetry
    for assembly in (whole, half):
        assert assembly.entity_id.tolist() == [1, 2, 1, 2]
        assert [chain.length for chain in assembly.chains] == [141, 146, 141, 146]
        assert len({chain.depth for chain in assembly.chains[::2]}) == 1  # copies share the alignment
        assert assembly.chains[0].depth > 1000
        found = ca_of(assembly)
        assert found is not None
        ca = np.split(found[0], np.cumsum([141, 146, 141]))
        for one, other in ((0, 1), (0, 3), (1, 2), (2, 3)):  # each alpha touches both betas
            assert np.linalg.norm(ca[one][:, None] - ca[other], axis=-1).min() < 8
        for k, chain in enumerate(ca):  # and nobody overlaps
            rest = np.concatenate(ca[:k] + ca[k + 1 :])
            assert np.linalg.norm(chain[:, None] - rest, axis=-1).min() > 3


def test_rows_of_a_real_alignment_have_their_organisms(store: Store) -> None:
    chain = read_assembly(store, "2q2k-assembly1").chains[0]
    assert chain.pairing is not None
    apart = ~chain.pairing.unpaired
    assert apart.any()  # of uniprot_hits.sto
    assert (chain.pairing.species[apart] != 0).mean() > 0.9
    assert not chain.pairing.species[~apart].any()  # where there is an alignment for pairing, only that one pairs


def test_real_assemblies_have_features(store: Store) -> None:
    config = SampleConfig(crop=128, max_msa=16, max_extra=32)
    for key in ("2hhb-assembly1", "2q2k-assembly1", "1ncb-assembly1", "1a0a-assembly1"):
        features = make_features(read_assembly(store, key), config, 0, (key, 0), 1, train=True)
        copies = read_assembly(store, key).sym_id.max()
        assert features["copy_atom_positions"].shape[:2] <= (copies, 128)
        assert len(features["aatype"]) == min(128, read_assembly(store, key).length)
