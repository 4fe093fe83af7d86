"""Freely published parameters that WarpFold reads: their addresses, their licences, and their download.

Sources, read in November 2026:

* DeepMind's: README.md of github.com/google-deepmind/alphafold (addresses, members, licence; no hashes).
* OpenFold's: docs/source/OpenFold_Parameters.md of github.com/aqlaboratory/openfold (the list, without the withdrawn
  finetuning_1.pt); the pages of huggingface.co/nz/OpenFold, from which OpenFold's script downloads (licence, SHA-256);
  and for initial_training.pt, which has 7 MB there, s3://openfold/openfold_params by its address over https.

Sizes are rounded, from those pages and from listings of users.  The list excludes parameters that WarpFold cannot read
(OpenFold's SoloSeq and multimers; successors of AlphaFold 3) and parameters that are not free.
"""

import difflib
import hashlib
import json
import os
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from warpfold.errors import UserError, printable
from warpfold.files import opened, sha256, write_atomically, write_new, writing
from warpfold.progress import Progress, no_progress

T = TypeVar("T")

LARGEST = 2 * 10**9  # bytes of a file of parameters
LARGEST_ARCHIVE = 20 * 10**9


@dataclass(frozen=True)
class Terms:
    """The terms of a publisher for use and redistribution of its files."""

    title: str
    by: str
    licence: str
    licence_address: str
    page: str  # where the publisher says so
    cite: str


@dataclass(frozen=True)
class PublishedParams:
    """A file of parameters.

    address: of the file, or of the tar that contains it.  sha256: of the file, if published.
    """

    name: str
    file: str
    megabytes: int
    about: str
    address: str
    terms: Terms
    sha256: str | None = None

    @property
    def in_archive(self) -> bool:
        """Return whether the address is that of a tar."""
        return self.address.endswith(".tar")

    @property
    def attribution(self) -> str:
        """Return the attribution that the licence requires whenever the file is passed on."""
        terms = self.terms
        return f"{self.file}, of the {terms.title}, by {terms.by}; {terms.licence} ({terms.licence_address}); unchanged"


_CC_BY = ("CC BY 4.0", "https://creativecommons.org/licenses/by/4.0/")
ALPHAFOLD = Terms(
    "AlphaFold parameters",
    "DeepMind Technologies Limited",
    *_CC_BY,
    "https://github.com/google-deepmind/alphafold#model-parameters-license",
    "Jumper et al., Nature 596, 583 (2021), https://doi.org/10.1038/s41586-021-03819-2; of complexes also "
    "Evans et al., https://doi.org/10.1101/2021.10.04.463034",
)
OPENFOLD = Terms(
    "OpenFold parameters",
    "the OpenFold team (AlQuraishi Laboratory)",
    *_CC_BY,
    "https://huggingface.co/nz/OpenFold",
    "Ahdritz et al., Nature Methods 21, 1514 (2024), https://doi.org/10.1038/s41592-024-02272-z",
)

_STORE = "https://storage.googleapis.com/alphafold/alphafold_params_"
_FAMILIES = {  # DeepMind's: date of the tar, content
    "": ("2022-12-06", "single chains"),
    "_ptm": ("2022-12-06", "single chains, with PAE and pTM"),
    "_multimer_v3": ("2022-12-06", "complexes"),
    "_multimer_v2": ("2022-03-02", "complexes; superseded"),
    "_multimer": ("2022-01-19", "complexes; superseded"),
}
_HUB = "https://huggingface.co/nz/OpenFold/resolve/6344b2a680cbbae20b8afdb7f154228cc5b0cb27"
_BUCKET = "https://openfold.s3.amazonaws.com/openfold_params"
_OPENFOLD = {
    "initial_training": ("before fine-tuning", None),
    "finetuning_2": ("fine-tuned", "9511993ad138a66f3c51412d65351c5162e16bc4abd51d76f8016b6e0c392362"),
    "finetuning_3": ("fine-tuned", "4ee7b3de7a2754c6102029b2997df3b9f32d3e9104836986939d1aba2a164494"),
    "finetuning_4": ("fine-tuned", "a0bc9cde0c9c09c9632e496cd290319ea4e2e63456c51063e3c44db6c0cb9dc0"),
    "finetuning_5": ("fine-tuned", "8b0951473212433443fc9970a7b902830d377da21bc3d0304dbbb01dd0d64ad2"),
    "finetuning_ptm_1": ("with PAE and pTM", "11b641d4c90440b945197892f8b048f9dd8ba6224a31960682847f6c07dd7075"),
    "finetuning_ptm_2": ("with PAE and pTM", "aff88a4534f500bcd4509584c2a6ce824417b31f4efaa5b17d19b4c97a8aaa49"),
    "finetuning_no_templ_1": ("without templates", None),
    "finetuning_no_templ_2": ("without templates", "400e1d95a41203633925b0d009e91371617a7123107acceb3ca07e278c3ee634"),
    "finetuning_no_templ_ptm_1": (
        "without templates, with PAE and pTM",
        "1a179937a6f61143c41f8b6a0b763ac1f4762c9dc63d2fb151240930c110bee1",
    ),
}

PUBLISHED = {
    params.name: params
    for params in (
        *(
            PublishedParams(
                f"model_{number}{family}",
                f"params_model_{number}{family}.npz",
                372 if number > 2 and "multimer" not in family else 373,
                description,
                f"{_STORE}{date}.tar",
                ALPHAFOLD,
            )
            for family, (date, description) in _FAMILIES.items()
            for number in range(1, 6)
        ),
        *(
            PublishedParams(
                name,
                f"{name}.pt",
                373 if "no_templ" in name else 375,
                f"single chains, {description}",
                f"{_BUCKET if name == 'initial_training' else _HUB}/{name}.pt",
                OPENFOLD,
                digest,
            )
            for name, (description, digest) in _OPENFOLD.items()
        ),
    )
}

# Several files at once, by names that people guess.
SETS = {
    "monomer": tuple(f"model_{number}" for number in range(1, 6)),
    "ptm": tuple(f"model_{number}_ptm" for number in range(1, 6)),
    "multimer": tuple(f"model_{number}_multimer_v3" for number in range(1, 6)),
    "multimer_v2": tuple(f"model_{number}_multimer_v2" for number in range(1, 6)),
    "multimer_v1": tuple(f"model_{number}_multimer" for number in range(1, 6)),
    "alphafold": tuple(name for name, params in PUBLISHED.items() if params.address == f"{_STORE}2022-12-06.tar"),
    "openfold": tuple(_OPENFOLD),
}
_SAME = {  # other names of them
    "multimer_v3": "multimer",
    "alphafold2": "alphafold",
    "alphafold_params_2022_12_06": "alphafold",
    "alphafold_2022_12_06": "alphafold",
    "alphafold2_ptm": "ptm",
    "alphafold_multimer": "multimer",
    "alphafold2_multimer_v3": "multimer",
    "alphafold2_multimer_v2": "multimer_v2",
    "alphafold2_multimer_v1": "multimer_v1",
}


def published(name: str) -> list[PublishedParams]:
    """Return the files for the name of a model, a file, or a set.

    Errors: UserError for an unknown name, with the most similar one.
    """
    plain = re.sub(r"\.(npz|pt|tar)$", "", name.strip().lower()).replace("-", "_")
    plain = re.sub(r"^(params|openfold|alphafold2?)_(?=model_|finetuning|initial)", "", plain)
    plain = _SAME.get(plain, plain)
    if plain in PUBLISHED:
        return [PUBLISHED[plain]]
    if plain in SETS:
        return [PUBLISHED[member] for member in SETS[plain]]
    suggestions = difflib.get_close_matches(plain, [*PUBLISHED, *SETS, *_SAME], cutoff=0.5)
    hint = f"Did you mean {suggestions[0]}? " if suggestions else ""
    raise UserError(f"{name}: no published parameters of this name. {hint}List them with `warpfold params fetch`.")


# ---- downloads


def fetch_params(
    name: str, out: Path, inspect: Callable[[Path], T], base: str | None = None, progress: Progress = no_progress
) -> list[T]:
    """Download the parameters of a name into the folder `out`, and return the result of `inspect` for each file.

    An existing file is kept if it is the published one or was downloaded before. Each file gets a FILE.source.json with
    its address, SHA-256, licence and attribution. An archive is held in a temporary file without a name.
    inspect: checks a file; it raises UserError for a damaged one.
    base: a mirror's address, a folder, or the file itself, instead of the published address.
    Errors: as in `warpfold.download.receive`; UserError for an unknown name, a different existing file, and a damaged
    file, which is deleted.
    """
    from warpfold.download import fetch_file, receive, source_of

    wanted_params = published(name)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    fetched = list[Path]()
    for address in dict.fromkeys(params.address for params in wanted_params):
        missing = [
            params for params in wanted_params if params.address == address and not _is_there(out / params.file, params)
        ]
        if not missing:
            continue
        source = source_of(address, base)
        fetched += [out / params.file for params in missing]
        if not missing[0].in_archive:
            for params in missing:
                path = out / params.file
                final = fetch_file(source, path, params.sha256, LARGEST, progress)
                _write_note(path, params, final, sha256(path), path.stat().st_size)
            continue
        if isinstance(source, Path):
            with opened(source, unpack=False) as file:
                _unpack(file, missing, out, str(source), progress)
            continue
        # A file without a name leaves nothing on the disk, even if this process is killed.
        with writing(out), tempfile.TemporaryFile(dir=out) as file:
            final = receive(source, file, address.rpartition("/")[2], LARGEST_ARCHIVE, progress)
            file.seek(0)
            _unpack(file, missing, out, final, progress)
    inspected = []
    for index, params in enumerate(wanted_params):
        progress(index, len(wanted_params), f"checking {params.file}")
        try:
            inspected.append(inspect(out / params.file))
        except UserError:
            # Otherwise the next run would keep the damaged file, by its note.
            if (path := out / params.file) in fetched:
                path.unlink()
                _note(path).unlink()
            raise
    return inspected


def _is_there(path: Path, one: PublishedParams) -> bool:
    """Return whether the published or an earlier downloaded file exists.  Errors: UserError for a different file."""
    if not os.path.lexists(path):
        return False
    expected = one.sha256 or _note_of(path).get("sha256")
    digest = sha256(path)
    if expected is None:
        raise UserError(
            f"{path}: is there, and nothing says that it is {one.name} (no {_note(path).name}). Pass it to --params as "
            "it is, or name another folder."
        )
    if digest != expected:
        raise UserError(
            f"{path}: is there, and is another file than {one.name}: its SHA-256 is {digest}, not {expected}"
        )
    return True


def _unpack(archive: IO[bytes], wanted: Sequence[PublishedParams], out: Path, address: str, progress: Progress) -> None:
    """Extract files from any folder of a tar; other members are skipped.

    Errors: UserError if the tar is damaged, or lacks one of the files.
    """
    missing = {params.file: params for params in wanted}
    try:
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            while missing and (member := tar.next()) is not None:
                params = missing.get(member.name.rpartition("/")[2])
                if params is None or not member.isreg() or member.size > LARGEST:
                    continue
                progress(len(wanted) - len(missing), len(wanted), f"extracting {params.file}")
                path, content = out / params.file, cast(IO[bytes], tar.extractfile(member))

                def copy(draft: Path, content: IO[bytes] = content, of: tuple[Path, Any] = (path, params)) -> None:
                    with open(draft, "xb+") as file:
                        shutil.copyfileobj(content, file)
                        file.seek(0)
                        digest = hashlib.file_digest(file, "sha256").hexdigest()
                    # The note comes first: a file without one would be taken for the user's.
                    _write_note(*of, address, digest, draft.stat().st_size)

                write_new(path, copy)
                del missing[params.file]
    # tarfile raises the last three for absurd sizes and times in headers.
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, MemoryError) as error:
        raise UserError(
            f"{address}: is not a tar that can be read ({printable(str(error))}). Give another source with --from."
        ) from None
    if missing:
        raise UserError(f"{address}: has no {', '.join(missing)}. Give the published archive.")


def _write_note(path: Path, one: PublishedParams, address: str, digest: str, size: int) -> None:
    """Write a note next to a file with its name, source and licence."""
    note = {
        "name": one.name, "file": one.file, "size": size, "sha256": digest, "published_sha256": one.sha256,
        "address": address, "published_at": one.address,
        "fetched": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **asdict(one.terms), "attribution": one.attribution,
    }  # fmt: skip
    write_atomically(_note(path), json.dumps(note, indent=1) + "\n")


def licence_of(path: Path, digest: str) -> str | None:
    """Return the licence of a file of parameters and its licensor; None if they are unknown.

    digest: the SHA-256 of the file.  A file is recognized by its published digest, by the note of `fetch_params`, or by
    its name if no digest was published.
    """
    note = _note_of(path)
    for params in PUBLISHED.values():
        is_certain = digest == params.sha256 or (note.get("name"), note.get("sha256")) == (params.name, digest)
        if is_certain or (params.sha256 is None and path.name == params.file):
            doubt = "" if is_certain else ", if this is the published file of that name"
            return f"{params.terms.licence} ({params.terms.licence_address}) by {params.terms.by}{doubt}"
    return None


def _note(path: Path) -> Path:
    return path.with_name(f"{path.name}.source.json")


def _note_of(path: Path) -> dict[str, Any]:
    """Read the note next to a downloaded file; empty without a readable note."""
    try:
        note = json.loads(_note(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}
