"""What decides the content of a store: options of `warpfold pack`, declared once (warpfold/arguments.py)."""

from dataclasses import asdict, dataclass
from datetime import date
from typing import Annotated, Any

from warpfold.arguments import Checked, decides

DATES = ("released_after", "released_before", "max_template_date")


@dataclass(frozen=True, kw_only=True)
class ExampleOptions(Checked):
    """The options that decide which chains become examples, and of predictions which residues (Supp. 1.3)."""

    min_length: Annotated[int, decides("Residues; shorter chains are dropped.", min=1)] = 10  # as many have a CA
    max_length: Annotated[int | None, decides("Residues; longer chains are dropped.", min=1)] = None
    min_depth: Annotated[int, decides("Alignment rows; chains with fewer are dropped.", min=1)] = 1  # Supp. 1.3: 200
    min_plddt: Annotated[
        float, decides("Of predictions: mean pLDDT of a chain; those with less are dropped.", min=0, max=100)
    ] = 50.0
    max_pae: Annotated[
        float | None, decides("Of predictions: mean PAE, Å; those with more, or with none, are dropped.", above=0)
    ] = None
    min_kl: Annotated[
        float,
        decides(
            "Of predictions with distograms: residues are masked whose confidence by them is less; 0: none is.", min=0
        ),
    ] = 0.5  # Supp. 1.3
    cluster_identity: Annotated[float, decides("Identity within a cluster; 1: equal sequences.", min=0, max=1)] = 0.4


@dataclass(frozen=True, kw_only=True)
class PackOptions(ExampleOptions):
    """The options that decide the content of a store.

    The paper's filters are the resolution, the share of one amino acid (Supp. 1.2.5), and clusters at 40 % identity.
    Dates are kept as text, always as YYYY-MM-DD, since a store records them; `day` parses one.
    Errors: UserError for a text that is not a date.
    """

    max_resolution: Annotated[float, decides("Å; worse structures are dropped.")] = 9.0  # one without (NMR) passes
    max_single: Annotated[float, decides("Share of one amino acid; chains with more are dropped.", max=1)] = 0.8
    released_after: Annotated[str | None, decides("YYYY-MM-DD; entries from this day on are kept.")] = None
    released_before: Annotated[str | None, decides("YYYY-MM-DD; entries up to the day before are kept.")] = None
    require_msa: Annotated[bool, decides("Drop chains without an alignment.")] = False
    max_template_date: Annotated[
        str | None, decides("YYYY-MM-DD; later templates are refused, and so are those later than their chain.")
    ] = None
    # AlphaFold-Multimer trains on the first assembly of each entry.
    assemblies: Annotated[bool, decides("Add each entry's first assembly, for multimers.")] = False
    all_assemblies: Annotated[bool, decides("As --assemblies, all of each entry.")] = False
    # As many as AlphaFold 3 trains on (its Supp. 2.5.4).
    max_chains: Annotated[int, decides("Of an assembly, copies too; larger ones are dropped.", min=1)] = 20
    # A spatial crop looks at all of its CA, in a second at most.
    max_residues: Annotated[int, decides("Of an assembly; larger ones are dropped.", min=1)] = 10_000
    max_file_gb: Annotated[
        float, decides("GB of a file when unpacked; larger files are left out.", above=0, max=1e6)
    ] = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in DATES:
            if (day := self.day(name)) is not None:
                object.__setattr__(self, name, day.isoformat())  # in one spelling: stores compare their options

    @property
    def has_assemblies(self) -> bool:
        """Return whether the store gets assemblies."""
        return self.assemblies or self.all_assemblies

    def recorded(self, predicted: bool = False) -> dict[str, Any]:
        """Return the options as a store records them: those of assemblies and of predictions only if it has any."""
        found = asdict(self)
        del found["all_assemblies"]
        if not predicted:
            found = {name: found[name] for name in found if name not in ("min_plddt", "max_pae", "min_kl")}
        if self.min_depth == 1:  # named only if given: stores of earlier versions can be continued
            del found["min_depth"]
        if self.has_assemblies:
            return found | {"assemblies": "all" if self.all_assemblies else "first"}
        return {name: found[name] for name in found if name not in ("assemblies", "max_chains", "max_residues")}

    @property
    def limit(self) -> int:
        """Return how many bytes a file may have when it is unpacked."""
        return int(self.max_file_gb * 1e9)

    def day(self, name: str) -> date | None:
        """Return the option `name`, a date, parsed.  Errors: UserError for what is no date."""
        from warpfold.data.structure.chain import parse_date_option  # NumPy is not needed to say what the options are

        return parse_date_option(getattr(self, name), f"--{name.replace('_', '-')}")
