"""Declare the options of `warpfold pack` that decide the content of a store (see warpfold/arguments.py)."""

from dataclasses import asdict, dataclass
from datetime import date
from typing import Annotated, Any

from warpfold.arguments import Checked, decides

DATES = ("released_after", "released_before", "max_template_date")


@dataclass(frozen=True, kw_only=True)
class ExampleOptions(Checked):
    """Options that select the chains, and for predictions the residues, of examples (Supp. 1.3)."""

    # At least this number of residues must have a CA.
    min_length: Annotated[int, decides("Residues; shorter chains are dropped.", min=1)] = 10
    max_length: Annotated[int | None, decides("Residues; longer chains are dropped.", min=1)] = None
    # Supp. 1.3 uses 200.
    min_depth: Annotated[int, decides("Alignment rows; chains with fewer are dropped.", min=1)] = 1
    min_plddt: Annotated[float, decides("Predictions: chains with a lower mean pLDDT are dropped.", min=0, max=100)] = (
        50.0
    )
    max_pae: Annotated[
        float | None, decides("Predictions: chains with a higher mean PAE (Å), or without PAE, are dropped.", above=0)
    ] = None
    # Supp. 1.3.
    min_kl: Annotated[
        float, decides("Predictions with distograms: residues of lower KL confidence are masked; 0: none.", min=0)
    ] = 0.5
    cluster_identity: Annotated[float, decides("Identity within a cluster; 1: equal sequences.", min=0, max=1)] = 0.4


@dataclass(frozen=True, kw_only=True)
class PackOptions(ExampleOptions):
    """Options that decide the content of a store.

    The filters of the paper are the resolution, the fraction of one amino acid (Supp. 1.2.5), and clusters at 40 %
    identity. Dates are stored as YYYY-MM-DD text, because a store records them; `day` parses them.
    Raises UserError for text that is not a date.
    """

    # Structures without a resolution (NMR) pass.
    max_resolution: Annotated[float, decides("Å; worse structures are dropped.")] = 9.0
    max_single: Annotated[float, decides("Fraction of one amino acid; chains with more are dropped.", max=1)] = 0.8
    released_after: Annotated[str | None, decides("YYYY-MM-DD; entries from this day on are kept.")] = None
    released_before: Annotated[str | None, decides("YYYY-MM-DD; entries up to the day before are kept.")] = None
    require_msa: Annotated[bool, decides("Drop chains without an alignment.")] = False
    max_template_date: Annotated[
        str | None, decides("YYYY-MM-DD; templates released later, or later than their chain, are refused.")
    ] = None
    # AlphaFold-Multimer trains on the first assembly of each entry.
    assemblies: Annotated[bool, decides("Add each entry's first assembly, for multimers.")] = False
    all_assemblies: Annotated[bool, decides("Add all assemblies of each entry.")] = False
    # This is the limit of AlphaFold 3's training (its Supp. 2.5.4).
    max_chains: Annotated[int, decides("Chains of an assembly, with copies; larger ones are dropped.", min=1)] = 20
    # A spatial crop compares all CA of an assembly, which takes at most a second with this limit.
    max_residues: Annotated[int, decides("Residues of an assembly; larger ones are dropped.", min=1)] = 10_000
    max_file_gb: Annotated[float, decides("GB of an unpacked file; larger files are skipped.", above=0, max=1e6)] = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in DATES:
            if (day := self.day(name)) is not None:
                # Stores compare options, so a date must have a single spelling.
                object.__setattr__(self, name, day.isoformat())

    @property
    def has_assemblies(self) -> bool:
        """Return whether the store gets assemblies."""
        return self.assemblies or self.all_assemblies

    def recorded(self, predicted: bool = False) -> dict[str, Any]:
        """Return the options that a store records; those of assemblies and predictions only if it has any."""
        options = asdict(self)
        del options["all_assemblies"]
        if not predicted:
            options = {name: options[name] for name in options if name not in ("min_plddt", "max_pae", "min_kl")}
        # The default is omitted, so that runs that earlier versions have started can be continued.
        if self.min_depth == 1:
            del options["min_depth"]
        if self.has_assemblies:
            return options | {"assemblies": "all" if self.all_assemblies else "first"}
        return {name: options[name] for name in options if name not in ("assemblies", "max_chains", "max_residues")}

    @property
    def limit(self) -> int:
        """Return the largest allowed size of an unpacked file in bytes."""
        return int(self.max_file_gb * 1e9)

    def day(self, name: str) -> date | None:
        """Parse the date option `name`. Raises UserError for text that is not a date."""
        # This imports NumPy, which --help does not need.
        from warpfold.data.structure.chain import parse_date_option

        return parse_date_option(getattr(self, name), f"--{name.replace('_', '-')}")
