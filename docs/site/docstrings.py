"""Convert docstrings to Markdown: each line "name: ..." becomes a paragraph."""

import re
from typing import Any

from griffe import Extension, Object


class LinesOfNames(Extension):
    """Separate the lines of a docstring that describe arguments or errors."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        """Start a paragraph at each line "name: ..." of a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"\n(?=\w[\w, ]*: )", "\n\n", obj.docstring.value)
