"""What is packed: the files that were found, and which part packs which of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from warpfold import __version__
from warpfold.bulk import JobPart
from warpfold.data.formats.input_files import ALIGNMENTS, HITS, STRUCTURES, InputFile, digest, find
from warpfold.data.pack.options import PackOptions
from warpfold.data.pack.part import Manifest


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
            if is_of(next(named, source.name), part):
                own.append(source)
        return own


def is_of(name: str, part: JobPart) -> bool:
    """Return whether the file of this name is one of a part's: that follows from the name alone."""
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
