"""Check that the BibTeX references of predictions list exactly the methods that were used."""

import re

import pytest

from warpfold.report.citations import bibtex

SUMMARY = {
    "versions": {"warpfold": "0.1.0"},
    "models": [{"file": "params_model_1_ptm.npz", "licence": "CC BY 4.0 by somebody"}] * 2
    + [{"file": "own.safetensors", "licence": None}],
}


@pytest.mark.parametrize("multimer", [False, True])
@pytest.mark.parametrize("server", [None, "https://example.org"])
def test_the_methods_that_were_used_are_cited(multimer: bool, server: str | None) -> None:
    text = bibtex({**SUMMARY, "msa_server": server}, multimer)
    keys = re.findall(r"^@\w+\{(\w+),$", text, re.M)
    expected = ["warpfold", "jumper2021alphafold"]
    assert keys == expected + ["evans2021multimer"] * multimer + ["mirdita2022colabfold"] * (server is not None)
    assert text.count("%   params_model_1_ptm.npz: CC BY 4.0 by somebody\n") == 1
    assert text.count("%   own.safetensors: licence not recorded\n") == 1
    outside = re.sub(r"^@\w+\{.*?^\}$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert all(line.startswith("%") for line in outside.split("\n") if line)
    assert text.count("{") == text.count("}")
