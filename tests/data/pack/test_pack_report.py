"""Compare whole reports of kept and dropped entries, and summaries of stores."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warpfold.data.pack.report import (
    PackEntry,
    PackReport,
    _compute_quartiles,
    store_summary_text,
    summarize_store,
)
from warpfold.data.store.store import Store, StoreWriter, pack_record

NO_FILE = "has no N.cif or N.cif.gz. Add it, or do without."
OWN = "is of the query's own entry"


def kept(name: str, **fields: Any) -> PackEntry:
    return PackEntry(name, "s/1abc.cif", True, **fields)


CHAIN: dict[str, Any] = {
    "reason": "a  note\twith\nblanks", "length": 30, "depth": 3, "templates": 2, "resolution": 2.0,
    "release_date": "2001-02-03", "cluster": "1abc_A", "alignments": ("m/a.a3m", "m/b.a3m"), "hits": ("h/a.hhr",),
    "templates_refused": {NO_FILE: 2, OWN: 1}, "templates_missing": 2, "structures_missing": ("2abc", "3abc"),
    "sequence": "ACD", "entity": "1abc_1", "method": "X-RAY DIFFRACTION", "shares": "x", "record": (1, 2, 3),
}  # fmt: skip
PREDICTED: dict[str, Any] = {"length": 50, "plddt": 80.25, "pae": 3.5, "kl": 0.75, "masked": 7, "depth": 1}
FIELDS = {
    "reason": "", "length": 0, "depth": 0, "templates": 0, "resolution": None, "release_date": None, "cluster": None,
    "alignments": [], "hits": [], "templates_refused": {}, "templates_missing": 0, "structures_missing": [],
}  # fmt: skip
HIDDEN = ("sequence", "entity", "method", "shares", "record")


def report() -> PackReport:
    entries = [
        PackEntry("z.cif", "s/z.cif", False, "ö bad"),
        kept("p_A", **PREDICTED),
        kept("1abc-assembly1", length=60, depth=3, templates=2, chains=("1abc_A", "1abc_A")),
        PackEntry("1abc_B", "s/1abc.cif", False, "too short", length=4),
        kept("1abc_A", **CHAIN),
        PackEntry("a.cif", "s/a.cif", False, "ö bad"),
    ]
    return PackReport(entries, {"m/c.a3m": "no kept chain"}, {"h/x.hhr": "is bad"})


def test_an_entry_shows_the_fields_that_it_has() -> None:
    base = {"name": "x", "file": "s/1abc.cif", "kept": True, **FIELDS}
    assert kept("x").to_json() == base
    shown = {name: list(v) if isinstance(v, tuple) else v for name, v in CHAIN.items() if name not in HIDDEN}
    assert kept("x", **CHAIN).to_json() == base | shown
    assert kept("x", **PREDICTED).to_json() == base | PREDICTED
    assert kept("x", plddt=0.0).to_json() == base | {"plddt": 0.0, "pae": None, "kl": None, "masked": 0}
    assert kept("x", chains=("a", "b")).to_json() == base | {"chains": ["a", "b"]}
    for fields in (CHAIN, PREDICTED, {"chains": ("a", "b")}, {}):
        entry = kept("x", **fields)
        assert PackEntry.from_json(entry.to_json()) == entry
        assert entry == replace(entry, **{name: "other" for name in HIDDEN})
        for name in fields.keys() - {*HIDDEN}:
            assert entry != replace(entry, **{name: "other"})
    # A million entries share equal texts and empty values.
    text = json.dumps(
        kept("x", reason="a reason", release_date="2001-02-03", method="NMR").to_json() | {"method": "N M R"}
    )
    first, other = (PackEntry.from_json(json.loads(text)) for _ in range(2))
    for name in ("templates_refused", "reason", "release_date", "method"):
        assert getattr(first, name) is getattr(other, name)
    every = {name: CHAIN[name] for name in HIDDEN}
    stored = json.loads(json.dumps({**kept("x").to_json(), **every}))
    assert {name: getattr(PackEntry.from_json(stored), name) for name in HIDDEN} == every


def test_a_report_sorts_its_entries_and_counts_reasons() -> None:
    made = report()
    assert [entry.name for entry in made.entries] == ["1abc-assembly1", "1abc_A", "1abc_B", "p_A", "a.cif", "z.cif"]
    assert [entry.name for entry in made.kept] == ["1abc-assembly1", "1abc_A", "p_A"]
    assert [entry.name for entry in made.chains] == ["1abc_A", "p_A"]
    assert [entry.name for entry in made.assemblies] == ["1abc-assembly1"]
    assert [entry.name for entry in made.dropped] == ["1abc_B", "a.cif", "z.cif"]
    data = made.to_json()
    assert data == {
        "kept": [entry.to_json() for entry in made.kept],
        "dropped": [entry.to_json() for entry in made.dropped],
        "reasons": {"ö bad": 2, "too short": 1},
        "unused_alignments": {"m/c.a3m": "no kept chain"},
        "unused_hits": {"h/x.hhr": "is bad"},
    }
    assert list(data["reasons"]) == ["ö bad", "too short"]
    assert made.finished_before is False
    again = PackReport.from_json(data)
    assert (again.entries, again.unused, again.unused_hits, again.finished_before) == (
        made.entries, made.unused, made.unused_hits, True,
    )  # fmt: skip


def test_the_text_of_a_report_has_an_entry_per_line() -> None:
    made = report()

    def line(entry: PackEntry) -> str:
        return json.dumps(entry.to_json(), ensure_ascii=False)

    assert "".join(made.text()).splitlines() == [
        "{",
        ' "kept": [',
        *(f"  {line(entry)}{',' if i < 2 else ''}" for i, entry in enumerate(made.kept)),
        " ],",
        ' "dropped": [',
        *(f"  {line(entry)}{',' if i < 2 else ''}" for i, entry in enumerate(made.dropped)),
        " ],",
        ' "reasons": {',
        '  "ö bad": 2,',
        '  "too short": 1',
        " },",
        ' "unused_alignments": {',
        '  "m/c.a3m": "no kept chain"',
        " },",
        ' "unused_hits": {',
        '  "h/x.hhr": "is bad"',
        " }",
        "}",
    ]
    for some in (made, PackReport([], {}), PackReport([kept("x")], {"a": "b", "c": "d"})):
        assert json.loads("".join(some.text())) == some.to_json()


def test_the_table_of_a_report() -> None:
    header, *rows = ("".join(report().table())).splitlines()
    names = (
        "name status reason length depth templates resolution release_date cluster templates_refused alignments hits "
        "file plddt pae kl masked"
    )
    assert header == names.replace(" ", "\t")
    missing = "2 x has no N.cif or N.cif.gz. Add it, or do without; 1 x is of the query's own entry"
    assert [row.split("\t") for row in rows] == [
        ["1abc-assembly1", "kept", "", "60", "3", "2", "", "", "", "", "", "", "s/1abc.cif", "", "", "", ""],
        [
            "1abc_A", "kept", "a note with blanks", "30", "3", "2", "2.0", "2001-02-03", "1abc_A", missing,
            "m/a.a3m m/b.a3m", "h/a.hhr", "s/1abc.cif", "", "", "", "",
        ],
        ["1abc_B", "dropped", "too short", "4", "0", "0", "", "", "", "", "", "", "s/1abc.cif", "", "", "", ""],
        ["p_A", "kept", "", "50", "1", "0", "", "", "", "", "", "", "s/1abc.cif", "80.25", "3.5", "0.75", "7"],
        ["a.cif", "dropped", "ö bad", "0", "0", "0", "", "", "", "", "", "", "s/a.cif", "", "", "", ""],
        ["z.cif", "dropped", "ö bad", "0", "0", "0", "", "", "", "", "", "", "s/z.cif", "", "", "", ""],
        ["", "unused alignment", "no kept chain", *[""] * 9, "m/c.a3m", *[""] * 4],
        ["", "unused hits", "is bad", *[""] * 9, "h/x.hhr", *[""] * 4],
    ]  # fmt: skip


def predictions(*fields: dict[str, Any]) -> list[PackEntry]:
    return [kept(f"p{i}_A", **{"alignments": ("m/a",), **more}) for i, more in enumerate(fields)]


REFUSED = {"hits": ("h",), "templates_refused": {NO_FILE: 2, OWN: 1}, "templates_missing": 2}


@pytest.mark.parametrize(
    ("entries", "more", "warnings"),
    [
        ([], "0 chains kept (0 with their sequence alone), 0 dropped, 1 alignments unused", []),
        (
            report().entries,
            "2 chains kept (1 with their sequence alone), 3 dropped, 1 alignments unused, 1 assemblies of 2 chains, "
            "2 templates, mean pLDDT 80.2, 14% of the residues masked, KL filter on 1 of them",
            [],
        ),
        (
            predictions(
                {"length": 10, "plddt": 60.0, "masked": 4, "depth": 2}, {"length": 30, "plddt": 80.0, "depth": 2}
            ),
            "2 chains kept (0 with their sequence alone), 0 dropped, 1 alignments unused, mean pLDDT 75.0, 10% of the "
            "residues masked, no KL filter (too few have distograms)",
            [],
        ),
        (
            predictions({"length": 10, "plddt": 0.0, "depth": 2}),
            "1 chains kept (0 with their sequence alone), 0 dropped, 1 alignments unused, mean pLDDT 0.0, 0% of the "
            "residues masked, no KL filter (too few have distograms)",
            [],
        ),
        (
            predictions({"hits": ("h",), "depth": 2}),
            "1 chains kept (0 with their sequence alone), 0 dropped, 1 alignments unused, "
            "0 templates: the files contain no hits",
            ["0 templates: the files contain no hits"],
        ),
        (
            predictions({**REFUSED, "structures_missing": ("1a", "2a"), "depth": 2}, {"depth": 1}),
            "2 chains kept (0 with their sequence alone), 0 dropped, 1 alignments unused, 0 of 3 templates used: "
            f"2 have no structure in the folders given (1a, 2a); 1 x {OWN}",
            [
                f"0 of 3 templates used: 2 have no structure in the folders given (1a, 2a); 1 x {OWN}",
                "1 alignment has only the row of the chain itself: p1_A",
            ],
        ),
        (
            predictions(
                {"hits": ("h",), "templates_refused": {NO_FILE: 1, OWN: 2}, "templates_missing": 1, "depth": 1,
                 "structures_missing": ("1a",)},
                {"hits": ("g",), "templates_refused": {OWN: 1, "other": 9}, "depth": 0},
            ),
            "2 chains kept (0 with their sequence alone), 0 dropped, 1 alignments unused, 0 of 13 templates used: "
            f"1 has no structure in the folders given (1a); 9 x other; 3 x {OWN}",
            [
                "0 of 13 templates used: 1 has no structure in the folders given (1a); 9 x other; 3 x "
                "is of the query's own entry",
                "2 alignments have only the row of the chain itself: p0_A, p1_A",
            ],
        ),
        (
            predictions(
                *({"hits": ("h",), "templates_refused": {NO_FILE: 1}, "templates_missing": 1, "depth": 1,
                   "structures_missing": (f"{i}a",)} for i in (0, 1, 2, 1, 3)),
            ),
            "5 chains kept (0 with their sequence alone), 0 dropped, 1 alignments unused, 0 of 5 templates used: no "
            "structure in the folders given (0a, 1a, 2a, ...)",
            [
                "0 of 5 templates used: no structure in the folders given (0a, 1a, 2a, ...)",
                "5 alignments have only the row of the chain itself: p0_A, p1_A, p2_A, ...",
            ],
        ),
        (
            predictions({**REFUSED, "templates": 3, "depth": 2}, {"depth": 1}, {"depth": 1}, {"depth": 1}),
            "4 chains kept (0 with their sequence alone), 0 dropped, 1 alignments unused, 3 templates",
            ["3 alignments have only the row of the chain itself: p1_A, p2_A, p3_A"],
        ),
        (
            [*predictions({"depth": 2}), PackEntry("x", "y", False, "bad", hits=("h",))],
            "1 chains kept (0 with their sequence alone), 1 dropped, 1 alignments unused",
            [],
        ),
    ],
)  # fmt: skip
def test_the_summary_and_the_warnings(entries: list[PackEntry], more: str, warnings: list[str]) -> None:
    made = PackReport(list(entries), {"m/c.a3m": "no kept chain"})
    assert (made.summary(), made.warnings(), repr(made)) == (more, warnings, f"<PackReport: {more}>")


# ---- stores


def stored(path: Path, columns: dict[str, list[Any]], files: dict[str, str]) -> Store:
    with StoreWriter(path, shard_bytes=1) as writer:
        for i in range(len(columns["length"])):
            record = pack_record({"x": np.arange(3)}, {})
            writer.add(f"k{i}", record, {name: values[i] for name, values in columns.items()})
        writer.finish(files)
    return Store(path)


def test_the_summary_of_a_store(tmp_path: Path) -> None:
    columns = {
        "length": [30, 10, 20, 1500, 40, 90, 60],
        "depth": [1, 7, 0, 3, 2, 9, 8],
        "templates": [0, 1, 0, 2, 4, 3, 3],
        "resolution": [2.0, None, 1.5, 3.0, None, 2.0, 1.0],
        "release_date": ["2001-2-3", None, "2001-12-01", "odd", "1999-01-01", "2020-01-01", None],
        "cluster": ["a", "b", "a", "c", "b", None, None],
        "chains": [None, None, None, None, None, ["k0", "k1", "k0"], ["k2", "k3"]],
    }
    origin = {
        "warpfold": "1.2",
        "options": {"max_single": 0.8, "released_after": None},
        "inputs": {
            "structures": {"files": 1234, "bytes": 2_560_000_000, "digest": "x"},
            "hits": {"files": 0, "bytes": 0, "digest": "x"},
            "alignments": {"files": 3, "bytes": 40_000, "digest": "x"},
        },
        "clustered": "MMseqs2 14",
    }
    store = stored(tmp_path / "s", columns, {"sources.json": json.dumps(origin)})
    summary = summarize_store(store)
    assert summary == {
        "path": str(tmp_path / "s"),
        "format": 5,
        "bytes": store.nbytes,
        "shards": 7,
        "entries": 5,
        "residues": 1600,
        "length": {"min": 10, "25%": 20, "median": 30, "75%": 40, "max": 1500},
        "depth": {"min": 0, "25%": 1, "median": 2, "75%": 3, "max": 7},
        "alone": 2,
        "templates": {"min": 0, "25%": 0, "median": 1, "75%": 2, "max": 4},
        "with_templates": 3,
        "clusters": 3,
        "resolution": {"min": 1.5, "25%": 1.5, "median": 2.0, "75%": 3.0, "max": 3.0},
        "release_date": ["1999-01-01", "2001-12-01"],
        "assemblies": 2,
        "assembly_chains": {"min": 2, "25%": 2, "median": 2, "75%": 3, "max": 3},
        "assembly_length": {"min": 60, "25%": 60, "median": 60, "75%": 90, "max": 90},
        "packed": origin,
    }
    summary |= {"bytes": 1_234_560_000}
    quarters = "min 60, 25% 60, median 60, 75% 90, max 90"
    assert store_summary_text(summary).splitlines() == [
        "entries         5 in 3 clusters, 1,600 residues",
        "length          min 10, 25% 20, median 30, 75% 40, max 1500",
        "alignment rows  min 0, 25% 1, median 2, 75% 3, max 7; 2 entries with their sequence alone",
        "templates       min 0, 25% 0, median 1, 75% 2, max 4; 3 entries with templates",
        "resolution (Å)  min 1.5, 25% 1.5, median 2, 75% 3, max 3",
        "released        1999-01-01 to 2001-12-01",
        "size            1,234.6 MB in 7 shards, format 5",
        f"assemblies      2; chains: min 2, 25% 2, median 2, 75% 3, max 3; length: {quarters}",
        "packed by       WarpFold 1.2",
        "from            1,234 structures (2,560.0 MB), 3 alignments (0.0 MB)",
        "options         max-single 0.8",
        "clusters by     MMseqs2 14",
    ]


def test_quartiles_are_values() -> None:
    values = np.random.default_rng(0).permutation(1001).tolist()
    assert _compute_quartiles(values) == {"min": 0, "25%": 250, "median": 500, "75%": 750, "max": 1000}
    assert _compute_quartiles([]) is None


def test_the_summary_of_a_store_that_pack_did_not_make(tmp_path: Path) -> None:
    summary = summarize_store(stored(tmp_path / "s", {"length": [5]}, {}))
    assert summary.pop("bytes") > 0
    five = {"min": 5, "25%": 5, "median": 5, "75%": 5, "max": 5}
    assert summary == {
        "path": str(tmp_path / "s"), "format": 5, "shards": 1, "entries": 1, "residues": 5, "length": five,
        "depth": None, "alone": 0, "templates": None, "with_templates": 0, "clusters": 0, "resolution": None,
        "release_date": None, "assemblies": 0, "assembly_chains": None, "assembly_length": None, "packed": None,
    }  # fmt: skip
    assert store_summary_text(summary | {"bytes": 0}).splitlines() == [
        "entries         1 in 0 clusters, 5 residues",
        "length          min 5, 25% 5, median 5, 75% 5, max 5",
        "alignment rows  unknown; 0 entries with their sequence alone",
        "templates       unknown; 0 entries with templates",
        "resolution (Å)  unknown",
        "released        unknown",
        "size            0.0 MB in 1 shards, format 5",
    ]
