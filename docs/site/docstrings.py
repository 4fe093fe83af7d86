"""Docstrings as the project writes them, as Markdown: a line that explains a name, "name: ...", stays a line."""

import re
from typing import Any

from griffe import Extension, Object


class LinesOfNames(Extension):
    """Keeps the lines of docstrings that explain an argument or an error apart."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        """Begin a paragraph at each line "name: ..." of a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"\n(?=\w[\w, ]*: )", "\n\n", obj.docstring.value)
