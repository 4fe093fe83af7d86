"""Read reference cases: the official code's inputs, parameters, outputs and gradients, as files of one folder.

The layout, all of it optional (the README beside the cases in `tests/golden` says what each file holds):

    models/<case>/{config,param_spec,param_checksums,noise_fp32_vs_fp64}.json, {features,outputs,params,grads}.npz
    units/<case>.{json,npz}, losses/<case>.{json,npz}, geometry/<case>.{json,npz}

NumPy only.  Whatever is wrong with a file (missing, cut short, not what its json says) is a `BrokenCase`.
"""

import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from warpfold.batch import Arrays
from warpfold.errors import UserError

KINDS = ("geometry", "losses", "units", "models")
COMPARED = ("out", "grad_in", "grad_params", "grad_params_sample", "grad_params_l2")


class BrokenCase(UserError):
    """A reference case that cannot be read; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class RoundingNoise:
    """How far the stored fp32 run of the official code is from its own fp64 run, for one array."""

    max_abs_diff: float
    max_abs: float


@dataclass(frozen=True)
class CaseFiles:
    """The files of one case.  `name` is their path under the folder asked for, without suffix; `kind` one of KINDS."""

    kind: str
    name: str
    path: Path  # the folder of a whole model; else the path of json and npz, without suffix


@dataclass(frozen=True)
class ReferenceCase:
    """One reference case, as read.

    inputs:     `in/*` of a unit, the features of a whole model.
    params:     by DeepMind's names `scope//name`.
    cotangents: by output; the gradients are those of sum over outputs of sum(output * cotangent).
    expected:   what is compared, by `out/*`, `grad_in/*`, `grad_params/*`, `grad_params_sample/*`, `grad_params_l2/*`.
    samples:    flat indices at which `grad_params_sample` was taken, by parameter.
    noise:      by the names of `expected`, where stated.
    """

    name: str
    kind: str
    meta: dict[str, Any]
    inputs: Arrays
    expected: Arrays
    params: Arrays = field(default_factory=dict)
    cotangents: Arrays = field(default_factory=dict)
    samples: Arrays = field(default_factory=dict)
    noise: dict[str, RoundingNoise] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """Return the official configuration of the module or model (empty where the case needs none)."""
        return self.meta.get("config") or {}

    @property
    def title(self) -> str:
        """Return the last part of the name, by which the case is known."""
        return self.name.rsplit("/", 1)[-1]

    def asks(self, group: str) -> list[str]:
        """Return the names of the expected arrays of one group, e.g. "grad_in" -> the inputs that need a gradient."""
        return [name.split("/", 1)[1] for name in self.expected if name.split("/", 1)[0] == group]


def find(folder: Path) -> list[CaseFiles]:
    """Find the cases at or below `folder`, geometry first, whole models last.  Errors: UserError if there is none."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give one that holds models/, units/, losses/ or geometry/")
    found: dict[tuple[int, str], CaseFiles] = {}
    top = folder.resolve()
    for path in sorted([top, *top.rglob("*")]):
        if path.is_dir() and (path.parent.name == "models" or (path == top and (path / "config.json").is_file())):
            kind, stem = "models", path
        elif path.suffix in (".json", ".npz") and path.parent.name in KINDS[:3]:
            kind, stem = path.parent.name, path.with_suffix("")
        else:
            continue
        name = stem.relative_to(top).as_posix() if stem != top else stem.name
        name = name if "/" in name else f"{kind}/{name}"
        found[KINDS.index(kind), name] = CaseFiles(kind, name, stem)
    if not found:
        raise UserError(f"{folder}: no reference case; expected models/, units/, losses/ or geometry/ in it")
    return [found[key] for key in sorted(found)]


def read(files: CaseFiles) -> ReferenceCase:
    """Read a case from its files.  Errors: BrokenCase."""
    return _read_model(files) if files.kind == "models" else _read_unit(files)


def _read_unit(files: CaseFiles) -> ReferenceCase:
    meta = _json(files.path.with_name(files.path.name + ".json"))
    path = files.path.with_name(files.path.name + ".npz")
    arrays = _npz(path)
    _check_shapes(path, arrays, meta.get("shapes"))
    groups: dict[str, Arrays] = {}
    for key, array in arrays.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = array
    if not groups.get("in") or not groups.get("out"):
        raise BrokenCase(f"{path}: holds no {'in' if not groups.get('in') else 'out'}/* arrays")
    return ReferenceCase(
        name=files.name,
        kind=files.kind,
        meta=meta,
        inputs=groups["in"],
        expected={f"{group}/{name}": x for group in COMPARED for name, x in groups.get(group, {}).items()},
        params=_params(path, groups.get("params"), meta.get("param_spec"), meta.get("param_checksums")),
        cotangents=groups.get("cot", {}),
        samples=groups.get("grad_params_sample_idx", {}),
        noise=_noise(path, meta.get("noise_fp32_vs_fp64"), ""),
    )


def _read_model(files: CaseFiles) -> ReferenceCase:
    folder = files.path

    def optional(name: str) -> Any:
        path = folder / name
        return (_npz(path) if path.suffix == ".npz" else _json(path)) if path.exists() else None

    meta = _json(folder / "config.json")
    if not isinstance(meta.get("config"), dict):
        raise BrokenCase(f"{folder / 'config.json'}: has no 'config'")
    stored = optional("params.npz")
    spec = _json(folder / "param_spec.json") if stored is None else optional("param_spec.json")
    expected = {"out": _npz(folder / "outputs.npz"), "grad_params": optional("grads.npz") or {}}
    return ReferenceCase(
        name=files.name,
        kind="models",
        meta=meta,
        inputs=_npz(folder / "features.npz"),
        expected={f"{group}/{name}": x for group, arrays in expected.items() for name, x in arrays.items()},
        params=_params(folder, stored, spec, optional("param_checksums.json")),
        noise=_noise(folder, optional("noise_fp32_vs_fp64.json"), "out/"),
    )


def _params(
    path: Path, stored: Arrays | None, spec: Mapping[str, Any] | None, sums: Mapping[str, Any] | None
) -> Arrays:
    """Return the parameters as stored, or made again from their recipe and checked against their sums.

    Where a parameter is stored and has a recipe, both must agree.
    The recipe: center + std * RandomState(seed).standard_normal(shape), rounded to float32.
    """
    made: Arrays = {}
    for name, recipe in (spec or {}).items():
        try:
            draw = np.random.RandomState(recipe["seed"]).standard_normal(tuple(recipe["shape"]))
            made[name] = (recipe["center"] + recipe["std"] * draw).astype(np.float32)
        except (KeyError, TypeError, ValueError) as error:
            raise BrokenCase(f"{path}: recipe of parameter {name}: {error!r}") from error
    for name, expected in (sums or {}).items():
        if name not in made:
            raise BrokenCase(f"{path}: checksum of parameter {name}, which has no recipe")
        total = float(made[name].sum(dtype=np.float64))
        if abs(total - expected["sum"]) > 1e-6 * (1 + expected["abs_sum"]):
            raise BrokenCase(f"{path}: parameter {name} sums to {total}, {expected['sum']} expected")
    if stored is None:
        return made
    for name in made:
        if name not in stored:
            raise BrokenCase(f"{path}: parameter {name} has a recipe but is not stored")
        if made[name].shape != stored[name].shape or not np.allclose(made[name], stored[name], rtol=0, atol=1e-6):
            raise BrokenCase(f"{path}: stored parameter {name} is not what its recipe makes")
    return stored


def _noise(path: Path, stated: Mapping[str, Any] | None, prefix: str) -> dict[str, RoundingNoise]:
    """Return the noise by compared name; entries of another form (sums over all gradients) are left out."""
    try:
        return {
            prefix + name: RoundingNoise(float(entry["max_abs_diff"]), float(entry["max_abs"]))
            for name, entry in (stated or {}).items()
            if isinstance(entry, dict)
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BrokenCase(f"{path}: noise_fp32_vs_fp64: {error!r}") from error


def _check_shapes(path: Path, arrays: Arrays, shapes: Mapping[str, list[int]] | None) -> None:
    for name, shape in (shapes or {}).items():
        if name not in arrays:
            raise BrokenCase(f"{path}: {name} is missing")
        if list(arrays[name].shape) != list(shape):
            raise BrokenCase(f"{path}: {name} has shape {list(arrays[name].shape)}, {list(shape)} in its json")


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BrokenCase(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise BrokenCase(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BrokenCase(f"{path}: holds a {type(value).__name__}, an object expected")
    return value


def _npz(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise BrokenCase(f"{path}: one array, an archive (.npz) expected")
            return {name: archive[name] for name in archive.files}
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise BrokenCase(f"{path}: cannot be read: {error}") from error
