"""What is packed, and how: the options, the files that were found, and which part packs which files."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from warpfold import __version__
from warpfold.bulk import JobPart
from warpfold.data.formats.input_files import ALIGNMENTS, HITS, STRUCTURES, InputFile, digest, find
from warpfold.data.pack.part import Manifest
from warpfold.data.similar.pairwise import MIN_IDENTITY
from warpfold.data.structure.chain import Chain, Structure, given_date
from warpfold.errors import UserError
from warpfold.files import LARGEST
from warpfold.geometry.residue import ATOM_ORDER


@dataclass(frozen=True)
class PackOptions:
    """The options that decide the content of a store.

    The paper's filters are the resolution, the share of one amino acid (Supp. 1.2.5), and clusters at 40 % identity.
    Dates are kept as text, always as YYYY-MM-DD, since a store records them; `day` parses one.
    Errors: UserError for a text that is not a date.
    """

    max_resolution: float = 9.0  # angstrom; structures without one (NMR) pass
    max_single: float = 0.8  # share of the sequence that one amino acid may have
    min_length: int = 10  # residues, and as many must have a CA
    max_length: int | None = None
    released_after: str | None = None  # YYYY-MM-DD, itself included
    released_before: str | None = None  # itself not included
    require_msa: bool = False  # otherwise a chain without alignment is kept with its sequence alone
    min_identity: float = MIN_IDENTITY  # between a chain and an alignment's query
    max_template_date: str | None = None  # itself included; a chain's templates are never newer than the chain
    cluster_identity: float = 0.4  # 1: equal sequences; ignored if a file of clusters is given
    max_file_gb: float = LARGEST / 1e9  # of a file when it is unpacked; larger ones are left out
    # Which biological assemblies become entries of their own: AlphaFold-Multimer trains on the first of each entry.
    assemblies: Literal["none", "first", "all"] = "none"
    max_chains: int = 20  # of an assembly, copies included: as many as AlphaFold 3 trains on (its Supp. 2.5.4)
    max_residues: int = 10_000  # of an assembly: a spatial crop looks at all of its CA, in a second at most

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"pack: --{option.name.replace('_', '-')} {value}: a finite number expected")
        if not 0 < self.max_file_gb <= 1e6:
            raise UserError(f"pack: --max-file-gb {self.max_file_gb:g}: expected a number over 0, and up to 1e6")
        least = {"min_length": 1, "max_length": 1, "max_chains": 1, "max_residues": 1}
        for name, low in least.items():
            if (value := getattr(self, name)) is not None and value < low:
                raise UserError(f"pack: --{name.replace('_', '-')} {value}: at least {low}")
        if self.max_single > 1 or not 0 <= self.cluster_identity <= 1:
            shares = f"--max-single {self.max_single:g}, --cluster-identity {self.cluster_identity:g}"
            raise UserError(f"pack: {shares}: are shares, of 1 at most")
        for name in ("released_after", "released_before", "max_template_date"):
            if (day := self.day(name)) is not None:
                object.__setattr__(self, name, day.isoformat())  # in one spelling: stores compare their options

    @property
    def has_assemblies(self) -> bool:
        """Return whether the store gets assemblies."""
        return self.assemblies != "none"

    def recorded(self) -> dict[str, Any]:
        """Return the options as a store records them: those of assemblies only if it has any."""
        unused = () if self.has_assemblies else ("assemblies", "max_chains", "max_residues")
        return {name: value for name, value in asdict(self).items() if name not in unused}

    @property
    def limit(self) -> int:
        """Return how many bytes a file may have when it is unpacked."""
        return int(self.max_file_gb * 1e9)

    def day(self, name: str) -> date | None:
        """Return the option `name`, a date, parsed."""
        return given_date(getattr(self, name), f"--{name.replace('_', '-')}")

    def drop_reason(self, structure: Structure, chain: Chain) -> str | None:
        """Return why this chain is dropped, or None."""
        length, resolved = len(chain.sequence), int((chain.mask[:, ATOM_ORDER["CA"]] > 0).sum())
        residue, count = Counter(chain.sequence).most_common(1)[0] if length else ("", 0)
        if structure.resolution is not None and structure.resolution > self.max_resolution:
            return f"resolution {structure.resolution:g} Å, over {self.max_resolution:g}"
        after, before = self.day("released_after"), self.day("released_before")
        if after is not None or before is not None:
            released = structure.release_date
            if released is None:
                return "no release date"
            if after is not None and released < after:
                return f"released {released}, before {after}"
            if before is not None and released >= before:
                return f"released {released}, not before {before}"
        if length < self.min_length:
            return f"{length} residues, fewer than {self.min_length}"
        if self.max_length is not None and length > self.max_length:
            return f"{length} residues, more than {self.max_length}"
        if resolved < self.min_length:
            return f"{resolved} residues with a CA, fewer than {self.min_length}"
        if count > self.max_single * length:
            return f"{count / length:.0%} of the sequence is {residue}, over {self.max_single:.0%}"
        return None


DEFAULTS = PackOptions()


@dataclass(frozen=True)
class PackInputs:
    """All files that are packed.  clusters: a file of clusters, if given."""

    structures: list[InputFile]
    alignments: list[InputFile]
    hits: list[InputFile]
    unrequested: list[InputFile]  # files of hits among the alignments that nobody asked for
    library: list[InputFile]  # structures of templates, where they are not those packed
    folders: tuple[Path, ...]  # where the templates' structures are looked for
    clusters: Path | None

    def manifest(self, options: PackOptions, part: JobPart) -> Manifest:
        """Return the inputs and options that decide the result."""
        kinds = {name: getattr(self, name) for name in ("structures", "alignments", "hits", "library")}
        kinds["clusters"] = find([self.clusters], (), "clusters") if self.clusters else []
        return {
            "part": str(part),
            "warpfold": __version__,
            "options": options.recorded(),
            "inputs": {
                name: {"files": len(found), "bytes": sum(one.size for one in found), "digest": digest(found)}
                for name, found in kinds.items()
            },
            "clusters": str(self.clusters.absolute()) if self.clusters else None,
        }

    def structures_of(self, part: JobPart) -> list[InputFile]:
        """Return the structure files of a part, chosen by their names alone."""
        return [source for source in self.structures if _is_of(source.name, part)]

    def alignments_of(self, part: JobPart) -> list[InputFile]:
        """Return the alignments whose queries a part reads: those with its structures' names, and some others.

        By the names of files alone, every alignment belongs to one part.
        """
        if part.count == 1:
            return self.alignments
        entries = {source.path.name.partition(".")[0].lower(): source.name for source in reversed(self.structures)}
        own = []
        for source in self.alignments:
            named = (
                entries[entry] for name in sorted(source.protein_names) if (entry := name.partition("_")[0]) in entries
            )
            if _is_of(next(named, source.name), part):
                own.append(source)
        return own


def _is_of(name: str, part: JobPart) -> bool:
    number = int.from_bytes(blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")
    return number % part.count == part.number - 1


def find_inputs(
    structures: Sequence[Path],
    msas: Sequence[Path] = (),
    hits: Sequence[Path] = (),
    template_structures: Sequence[Path] = (),
    clusters: Path | None = None,
) -> PackInputs:
    """Find the inputs in the given files and folders.

    Files in `msas` that are named like template hits (`pdb70_hits.hhr`, `hmm_output.sto` ...) are not taken as
    alignments; in `hits`, every file is taken as hits except the alignments of `msas`.
    Errors: UserError for a path that does not exist, or where nothing is found.
    """
    found = find(structures, STRUCTURES, "structures")
    aligned = find(msas, (*ALIGNMENTS, *HITS), "alignments") if msas else []
    alignments = [one for one in aligned if not one.is_hits]
    taken = {one.identity for one in alignments}
    all_hits = [one for one in find(hits, HITS, "template hits") if one.identity not in taken] if hits else []
    taken |= {one.identity for one in all_hits}
    library = find(template_structures, STRUCTURES[:2], "structures of templates") if template_structures else []
    folders = [path if path.is_dir() else path.parent for path in map(Path, template_structures or structures)]
    return PackInputs(
        structures=found,
        alignments=alignments,
        hits=all_hits,
        unrequested=[one for one in aligned if one.identity not in taken],
        library=library,
        folders=tuple(dict.fromkeys(folder.absolute() for folder in folders)) if hits else (),
        clusters=clusters,
    )
