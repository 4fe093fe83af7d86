"""Convert settings files (TOML) to frozen dataclasses, and back.

The `base` key of a settings file, if any, names a preset or another file whose values the file overrides. Dataclasses
declare the settings, next to the code that they configure (`ModelConfig` in model/alphafold.py). Larger ones are
composed of smaller ones (`RunConfig` in training/config.py), and `build` fills them.

TOML has no null, so the string "none" represents None.
"""

import dataclasses
import difflib
import json
import math
import re
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from warpfold.errors import UserError

T = TypeVar("T")
Mapped = dict[str, Any]

# Presets are in `settings/` of a checkout, and in `warpfold/presets` of a wheel.
PRESETS = (Path(__file__).parent / "presets", Path(__file__).parents[1] / "settings")


def presets() -> dict[str, Path]:
    """List the presets of WarpFold: name -> file."""
    return {file.stem: file for folder in PRESETS for file in sorted(folder.glob("*.toml"))}


def find(name: str | Path, beside: Path | None = None) -> Path:
    """Find a settings file by path or by the name of a preset.

    beside: the folder to which a path is relative; default: the current folder.
    Errors: UserError with a list of the presets if there is no such file.
    """
    path = beside / name if beside else Path(name)
    if path.is_file():
        return path
    preset_paths = presets()
    if str(name) in preset_paths:
        return preset_paths[str(name)]
    raise UserError(
        f"{name}: no such settings file; give a path or a preset ({', '.join(sorted(preset_paths)) or 'none'})"
    )


def load(name: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Mapped:
    """Load a settings file, with the values of its bases below its own, and `overrides` ("model.c_m=64") on top.

    name: a file, a preset, or nested values with an optional `base`.
    Returns nested dicts, which `build` checks against a dataclass.
    Errors: UserError for a missing file, invalid TOML, a cycle of bases, or an override without "=".
    """
    merged: Mapped = {}
    for _, values in layers(name, overrides):
        merged = merge(merged, values)
    return merged


def layers(name: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> list[tuple[Path | None, Mapped]]:
    """Read the layers that `load` merges, as (file or None, values): the lowest base first, the overrides last."""
    stack: list[tuple[Path | None, Mapped]] = []
    if isinstance(name, Mapping):
        values = plain(name)
        base = values.pop("base", None)
        stack = [] if base is None else layers(base)
        return [*stack, (None, values), *((None, _parse_override(override)) for override in overrides)]
    path = find(name)
    visited: list[Path] = []
    while True:
        if path.resolve() in visited:
            raise UserError(f"{path}: its `base` leads back to itself; remove one of them")
        visited.append(path.resolve())
        values = _read(path)
        base = values.pop("base", None)
        stack.insert(0, (path, values))
        if base is None:
            break
        if not isinstance(base, str) or not base.strip():
            raise UserError(f"{path}: base must be one name or path, not {base!r}")
        try:
            path = find(base, beside=path.parent)
        except UserError as error:
            raise UserError(f"{path}: its base {error}") from None
    return stack + [(None, _parse_override(override)) for override in overrides]


def _read(path: Path) -> Mapped:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        # tomllib raises ValueError for invalid UTF-8 and for integers with thousands of digits as well.
        raise UserError(f"{path}: not valid TOML: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def merge(under: Mapped, over: Mapped) -> Mapped:
    """Merge nested dicts. The values of `over` replace those of `under`."""
    merged = dict(under)
    for key, value in over.items():
        are_dicts = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if are_dicts else value
    return merged


def _parse_override(text: str) -> Mapped:
    """Parse "a.b=1" to {"a": {"b": 1}}; a value that is not TOML is a string."""
    key, equals, value = text.partition("=")
    keys = [part.strip() for part in key.split(".")]
    if not equals or not all(keys):
        raise UserError(f"--set {text}: expected KEY=VALUE, for example --set model.c_m=64")
    try:
        nested: Any = tomllib.loads("value = " + value.strip().replace("\n", " "))["value"]
    except (ValueError, RecursionError):
        nested = value.strip()
    for part in reversed(keys):
        nested = {part: nested}
    return nested


def build(cls: type[T], values: Mapping[str, Any], source: str = "settings", prefix: str = "") -> T:
    """Make a dataclass from nested dicts; fields that are not named keep their defaults.

    source: begins each message, for example the file's name.  prefix: of the keys in messages.
    Errors: UserError for an unknown key (with the nearest name), a value of the wrong type, a missing value, or a
    ValueError that the dataclass's own `__post_init__` raises.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    hints = get_type_hints(cls)
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            cure = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(fields)}"
            raise UserError(f"{source}: {prefix}{key} is not a setting; {cure}")
    arguments = {}
    for name, field in fields.items():
        if name in values:
            arguments[name] = convert(hints[name], values[name], source, prefix + name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            if not dataclasses.is_dataclass(hints[name]):
                raise UserError(f"{source}: {prefix}{name} has no value; it must be set")
            arguments[name] = build(hints[name], {}, source, f"{prefix}{name}.")
    try:
        return cls(**arguments)
    except ValueError as error:
        raise UserError(f"{source}: {prefix.rstrip('.') or 'settings'}: {error}") from error


def convert(hint: Any, value: Any, source: str, name: str) -> Any:
    """Convert a value to the type that the field declares, or raise UserError.

    Infinity, NaN, and integers beyond 64 bits are errors for every field.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{source}: {name} = {value}: a finite number expected")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError(f"{source}: {name} is a whole number that does not fit into 64 bits; give a smaller one")
    type_error = UserError(f"{source}: {name} = {_shown(value)}: {_describe(hint)} expected")
    origin, choices = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if type(None) in choices and value == "none":
            return None
        for choice in choices:
            if choice is not type(None):
                try:
                    return convert(choice, value, source, name)
                except UserError as error:
                    if dataclasses.is_dataclass(choice) and isinstance(value, dict):
                        type_error = error
        raise type_error
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise type_error
        return build(cast(type[Any], hint), value, source, f"{name}.")
    if origin is Literal:
        if value not in choices:
            raise type_error
        return value
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            raise type_error
        item_hints = [choices[0]] * len(value) if origin is list or choices[-1] is Ellipsis else list(choices)
        if len(item_hints) != len(value):
            raise type_error
        return origin(convert(h, v, source, f"{name}[{i}]") for i, (h, v) in enumerate(zip(item_hints, value)))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise type_error
        return {key: convert(choices[1], v, source, f"{name}.{key}") for key, v in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    raise type_error


def _describe(hint: Any) -> str:
    origin, choices = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(toml_value, choices))
    if origin in (Union, types.UnionType):
        return " or ".join('"none"' if c is type(None) else _describe(c) for c in choices)
    if origin in (tuple, list):
        return "a list" if origin is list or choices[-1] is Ellipsis else f"a list of {len(choices)}"
    if dataclasses.is_dataclass(hint) or origin is dict:
        return "a table"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a string", date: "a date"}.get(
        hint, str(hint)
    )


def to_dict(config: Any) -> Mapped:
    """Convert a dataclass to nested dicts of what TOML and JSON can hold: the inverse of `build`."""
    return {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config) if field.init}


def plain(value: Any) -> Any:
    """Return a value as TOML and JSON can hold it."""
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    if isinstance(value, Mapping):
        return {key: plain(v) for key, v in value.items()}
    return "none" if value is None else value


def to_toml(config: Any) -> str:
    """Convert a dataclass to TOML that `load` and `build` read back to an equal one."""
    return "\n".join(_tables(to_dict(config), "")).strip() + "\n"


def _tables(values: Mapped, name: str) -> Iterator[str]:
    if name:
        yield f"\n[{name}]"
    yield from (f"{_key(k)} = {toml_value(v)}" for k, v in values.items() if not isinstance(v, dict))
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _tables(value, f"{name}.{_key(key)}" if name else _key(key))


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _quoted(key)


def toml_value(value: Any) -> str:
    """Write a TOML value on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, int) and value.bit_length() > 64:
        return hex(value)  # Python refuses to write integers of thousands of digits as decimals
    return _quoted(value) if isinstance(value, str) else str(value)  # inf and nan are TOML too


def _shown(value: Any) -> str:
    """Write a value for a one-line error: as TOML, shortened."""
    text = toml_value(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _quoted(text: str) -> str:
    """Quote a string as JSON does, and escape DEL, as TOML requires."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def differences(ours: Mapped, theirs: Mapped, prefix: str = "") -> list[str]:
    """Return the dotted keys in which two nested dicts differ, each with both values: "model.c_m: 64, not 32"."""
    return [f"{key}: {values}" for key, values in differing_values(ours, theirs, prefix).items()]


def differing_values(ours: Mapped, theirs: Mapped, prefix: str = "") -> dict[str, str]:
    """Return both values as text, by the dotted keys in which two nested dicts differ: {"model.c_m": "64, not 32"}."""
    values: dict[str, str] = {}
    for key in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(key), theirs.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            values |= differing_values(a, b, f"{prefix}{key}.")
        elif a != b:
            shown = ["absent" if v is None else toml_value(v) for v in (a, b)]
            values[f"{prefix}{key}"] = f"{shown[0]}, not {shown[1]}"
    return values
