"""The references of a run of `predict`, as BibTeX."""

from collections.abc import Mapping
from typing import Any

ENTRIES = {
    "warpfold": """@software{warpfold,
  title   = {WarpFold},
  author  = {{WarpFold contributors}},
  version = {%s},
}""",
    "alphafold2": """@article{jumper2021alphafold,
  title   = {Highly accurate protein structure prediction with {AlphaFold}},
  author  = {Jumper, John and others},
  journal = {Nature},
  volume  = {596},
  pages   = {583--589},
  year    = {2021},
  doi     = {10.1038/s41586-021-03819-2},
}""",
    "multimer": """@article{evans2021multimer,
  title   = {Protein complex prediction with {AlphaFold-Multimer}},
  author  = {Evans, Richard and others},
  journal = {bioRxiv},
  year    = {2021},
  doi     = {10.1101/2021.10.04.463034},
}""",
    "colabfold": """@article{mirdita2022colabfold,
  title   = {{ColabFold}: making protein folding accessible to all},
  author  = {Mirdita, Milot and others},
  journal = {Nature Methods},
  volume  = {19},
  pages   = {679--682},
  year    = {2022},
  doi     = {10.1038/s41592-022-01488-1},
}""",
}


def bibtex(summary: Mapping[str, Any], multimer: bool) -> str:
    """List the references of the methods that a run used, with the files of its parameters and their licences.

    summary: the content of summary.json. multimer: whether parameters of AlphaFold-Multimer were used.
    """
    used = ["warpfold", "alphafold2"]
    used += ["multimer"] if multimer else []
    # The alignments of a server with ColabFold's protocol.
    used += ["colabfold"] if summary.get("msa_server") else []
    lines = (f"%   {model['file']}: {model['licence'] or 'licence not recorded'}" for model in summary["models"])
    notes = [
        *("% Parameters:", *dict.fromkeys(lines)),
        "% Structures refined by `warpfold relax` also need a reference to OpenMM: doi:10.1371/journal.pcbi.1005659.",
    ]
    entries = [
        ENTRIES[name] % summary["versions"]["warpfold"] if name == "warpfold" else ENTRIES[name] for name in used
    ]
    return "\n".join(notes) + "\n\n" + "\n\n".join(entries) + "\n"
