"""Find external resources that a page or a style sheet loads: scripts, styles, fonts, pictures, frames.

Links for readers are not resources.
"""

import re
from html.parser import HTMLParser
from pathlib import Path

# The attributes with which a tag loads a resource.
LOADS = {
    "script": ("src",),
    "link": ("href",),
    "img": ("src", "srcset"),
    "source": ("src", "srcset"),
    "iframe": ("src",),
    "video": ("src", "poster"),
    "audio": ("src",),
    "embed": ("src",),
    "object": ("data",),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
}
# Kinds of <link> that load nothing.
SAYS = {"canonical", "next", "prev", "alternate", "author", "license"}
ELSEWHERE = re.compile(r"(?:^|[\s,])((?:https?:)?//[^\s,]+)")
IN_STYLES = re.compile(r"(?:url\(\s*|@import\s+)[\"']?((?:https?:)?//[^\s\"')]+)")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.within = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.within = tag
        values = {name: value or "" for name, value in attrs}
        if not (tag == "link" and set(values.get("rel", "").split()) <= SAYS):
            for name in LOADS.get(tag, ()):
                self.found += ELSEWHERE.findall(values.get(name, ""))
        self.found += IN_STYLES.findall(values.get("style", ""))

    def handle_data(self, data: str) -> None:
        if self.within == "style":
            self.found += IN_STYLES.findall(data)

    def handle_endtag(self, tag: str) -> None:
        self.within = ""


def loaded(text: str, kind: str) -> list[str]:
    """Return the external addresses from which a page (`kind` ".html", ".svg") or a style sheet (".css") loads."""
    if kind == ".css":
        return IN_STYLES.findall(text)
    page = _Page()
    page.feed(text)
    page.close()
    return page.found


def external(site: Path) -> list[str]:
    """Return "file: address" for every external resource of a built site."""
    return [
        f"{path.relative_to(site)}: {address}"
        for path in sorted(site.rglob("*"))
        if path.suffix in (".html", ".css", ".svg")
        for address in loaded(path.read_text(encoding="utf-8"), path.suffix)
    ]
