"""Signatures of other people's functions: what they are called with, and arguments put in their places."""

import inspect
from collections.abc import Callable
from typing import Any


def signature_of(function: Callable[..., Any]) -> str:
    """Return the signature of a function, without annotations."""
    given = _unwrapped(function)
    bare = [p.replace(annotation=p.empty) for p in given.parameters.values()]
    return str(given.replace(parameters=bare, return_annotation=given.empty))


def _unwrapped(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, or of the only one that it wraps if it hands on whatever it is given."""
    given = inspect.signature(function)
    anything = [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
    if [p.kind for p in given.parameters.values()] == anything:
        wrapped = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        functions = [one for one in wrapped if inspect.isfunction(one)]
        if len(functions) == 1:
            return _unwrapped(functions[0])
    return given


def places_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a method's arguments that may be given by place, but for self."""
    found = _unwrapped(function).parameters.values()
    return tuple(p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]


def in_place(places: tuple[str, ...], args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return arguments of which those by name are in their places, up to the first that was not given."""
    for name in places[len(args) :]:
        if name not in kwargs:
            break
        args = (*args, kwargs.pop(name))
    return args, kwargs
