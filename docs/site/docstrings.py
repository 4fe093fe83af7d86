"""Prepare signatures and docstrings for the site."""

import importlib
import inspect
import re
from typing import Any

from griffe import Extension, Function, Object


class DeclaredArguments(Extension):
    """Show the functions of commands as `help()` does: plain types, and a line for each argument."""

    def on_function(self, *, func: Function, **kwargs: Any) -> None:
        """Replace the annotations and the docstring by those of the imported function, which needs no torch."""
        module, _, name = func.path.rpartition(".")
        # Methods and `load` are decorated by other names, because their modules import torch.
        if any(str(one.value).startswith("checked(") for one in func.decorators) and func.docstring is not None:
            function = getattr(importlib.import_module(module), name)
            func.docstring.value = function.__doc__.replace("\nArguments:\n", "\n")
            for parameter in inspect.signature(function).parameters.values():
                shown = inspect.formatannotation(parameter.annotation)
                shown = re.sub(r"ForwardRef\('(\w+)'\)|collections\.abc\.|typing\.", r"\1", shown)
                func.parameters[parameter.name].annotation = shown


class LinesOfNames(Extension):
    """Separate the lines of a docstring that describe arguments or errors."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        """Start a paragraph at each line "name: ..." of a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"\n *(?=\w[\w, ]*: )", "\n\n", obj.docstring.value)
