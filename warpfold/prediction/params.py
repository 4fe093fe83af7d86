"""The parameters that `predict` folds with: one file or several, each with a name of its own, known before loading."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warpfold.data.features.choose import SampleConfig
from warpfold.errors import UserError
from warpfold.files import file_name, opened
from warpfold.model.alphafold import ModelConfig
from warpfold.model.weights import assumed_settings, data_settings, load_config
from warpfold.settings import build

_OFFICIAL = re.compile(r"params_model_(?P<number>\d+)(_(?P<family>ptm|multimer(_v\d+)?))?")  # DeepMind's


@dataclass(frozen=True)
class Params:
    """A file of parameters: what it is of, and how its examples were drawn."""

    name: str  # among those of a run; safe in a path
    path: Path
    digest: str  # sha256 of the file
    config: ModelConfig
    sample: SampleConfig

    @property
    def multimer(self) -> bool:
        """Return whether the model folds complexes."""
        return self.config.multimer is not None

    def summary(self) -> dict[str, Any]:
        """Return what summary.json says of the file."""
        return {"file": self.path.name, "sha256": self.digest, "assumed": assumed_settings(self.path)}


ENDINGS = (".npz", ".safetensors")
# What errors say of a multimer's parameters: nothing is fetched here.
MULTIMERS = (
    "params_model_*_multimer_v3.npz, in https://storage.googleapis.com/alphafold/alphafold_params_2022-12-06.tar"
)


def params_files(given: Sequence[Path], num_models: int | None = None, complexes: bool = False) -> list[Path]:
    """Return files of parameters, those in folders by number, and of these `num_models` at most.

    A folder may hold DeepMind's of several families.  One is taken: AlphaFold-Multimer's newest version where there
    are `complexes`, otherwise the single chains' with PAE, or those without.  complexes: whether there are any.
    Errors: UserError for a folder without parameters, one with several kinds of which none is the one to take, and for
    fewer than `num_models`.
    """
    found: list[Path] = []
    for path in given:
        files = _in_folder(path, complexes) if path.is_dir() else [path]
        found += files[:num_models] if path.is_dir() else files
    if num_models is not None and len(found) < num_models:
        raise UserError(
            f"--num-models {num_models}: {given[0]} has {len(found)} that fit; ask for as many as there are"
        )
    return found[:num_models]


def families_in(folder: Path) -> dict[str, list[Path]]:
    """Return files of parameters in a folder by DeepMind's family ("", "ptm", "multimer_v3"), and others as "own".

    Within a family they are in the order of the models' numbers.
    """
    files = [path for path in sorted(folder.iterdir()) if path.suffix in ENDINGS and not path.name.startswith(".")]
    families: dict[str, list[Path]] = {}
    for path in files:
        named = _OFFICIAL.fullmatch(path.stem)
        families.setdefault(named["family"] or "" if named else "own", []).append(path)
    return families


def _in_folder(folder: Path, complexes: bool) -> list[Path]:
    """Return the files of one family in a folder."""
    families = families_in(folder)
    if not families:
        raise UserError(f"{folder}: has no parameters; give a folder of params_model_*.npz or .safetensors")
    if len(families) == 1:
        return next(iter(families.values()))
    multimers = sorted(name for name in families if name.startswith("multimer"))
    order = multimers[::-1] if complexes else [name for name in ("ptm", "", "own") if name in families]
    if "own" in families or not order:
        raise UserError(
            f"{folder}: has parameters of several kinds ({', '.join(paths[0].name for paths in families.values())}); "
            "name the files"
        )
    return families[order[0]]


def read_params(paths: Sequence[Path]) -> list[Params]:
    """Return what the files hold, in the given order, without loading the parameters.

    A name is that of the file without its ending; where files share it, with their folder's before it.
    Errors: UserError for a file that holds no parameters, one that is given twice, and files that cannot be told apart.
    """
    stems = [file_name(path.stem) for path in paths]
    names = [
        file_name(f"{path.absolute().parent.name}_{stem}") if stems.count(stem) > 1 else stem
        for path, stem in zip(paths, stems)
    ]
    found: list[Params] = []
    for path, name in zip(paths, names):
        config = load_config(path)
        with opened(path, unpack=False) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # it has readinto
        for other in found:
            if other.digest == digest:
                raise UserError(f"{path}: the same parameters as {other.path}; give each file once")
            if other.name.lower() == name.lower():  # some file systems do not tell A from a
                raise UserError(f"{path}: a file and folder named as of {other.path}; rename one of the files")
        sample = build(SampleConfig, data_settings(path), str(path))
        found.append(Params(name, path, digest, config, sample))
    return found


def check_templates(config: ModelConfig, sample: SampleConfig, count: int) -> None:
    """Raise UserError unless a model takes `count` templates."""
    if count and not config.templates.enabled:
        raise UserError(
            "these parameters have no template parts (of AlphaFold2's, model_3 to model_5 have none); "
            "give others, or no templates"
        )
    if count > sample.max_templates:
        raise UserError(f"templates given: {count}, the model takes {sample.max_templates}; leave some out")
