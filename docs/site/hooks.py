"""Hooks of mkdocs: add generated pages, and the files outside docs/ to which pages link.

Pages are written for GitHub, where links such as `../CHANGELOG.md` work.  Every linked file of the repository is
therefore added to the site: Markdown as a page, a folder as a list of its files, other files unchanged.
"""

import os
import re
from functools import partial
from pathlib import Path

from external import external
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from reference import commands, messages, notebook, python_interface, settings_reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]+)?\))")
# The theme loads this script for the search of pages on a disk.
WORKER = "https://unpkg.com/iframe-worker/shim"
GENERATED = {
    "reference/commands.md": commands,
    "reference/python.md": python_interface,
    "reference/settings.md": settings_reference,
    "reference/messages.md": messages,
    "notebook.md": partial(notebook, "fold.ipynb"),
    "design_notebook.md": partial(notebook, "design.ipynb"),
}
NOTEBOOKS = {DOCS / "fold.ipynb": DOCS / "notebook.md", DOCS / "design.ipynb": DOCS / "design_notebook.md"}


def place(path: Path) -> str:
    """Return the path of a file or folder of the repository in the sources of the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return "repository/" + path.relative_to(ROOT).as_posix() + ("/README.md" if path.is_dir() else "")


def targets(text: str, folder: Path) -> list[Path]:
    """Return the files and folders of the repository to which a page in `folder` links."""
    links = (match[2] for match in LINK.finditer(text) if "://" not in match[2])
    paths = (Path(os.path.normpath(folder / link)) for link in links)
    return [path for path in paths if path.exists() and path.is_relative_to(ROOT)]


def listing(folder: Path) -> str:
    """Build a page that lists the files of a folder of the repository."""
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    return f"# {folder.relative_to(ROOT)}\n\n" + "".join(f"* [{name}]({name})\n" for name in files)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages, the linked files outside docs/, and the files to which these link."""
    for name, make in GENERATED.items():
        files.append(File.generated(config, name, content=make()))
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    while waiting:
        page = waiting.pop()
        for path in targets(page.read_text(encoding="utf-8"), page.parent):
            if path.is_relative_to(DOCS) or files.get_file_from_path(place(path)):
                continue
            if path.is_dir():
                files.append(File.generated(config, place(path), content=listing(path)))
                inside = [file for file in path.iterdir() if file.is_file()]
            else:
                inside = [path]
            for file in inside:
                if not files.get_file_from_path(place(file)):
                    files.append(File.generated(config, place(file), abs_src_path=str(file)))
            waiting += [file for file in inside if file.suffix == ".md"]
    for file in files.documentation_pages():
        if file.src_uri.startswith("repository/"):
            file.inclusion = file.inclusion.NOT_IN_NAV
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to files of the repository as links within the site."""
    source = page.file.src_uri
    if source in GENERATED:
        return markdown
    inside = source.removeprefix("repository/")
    folder = (DOCS / source if inside == source else ROOT / inside).parent

    def moved(match: re.Match[str]) -> str:
        for path in targets(match[0], folder):
            # GitHub renders notebooks, but a browser would download them.
            path = NOTEBOOKS.get(path, path)
            return match[1] + os.path.relpath(place(path), os.path.dirname(source) or ".") + match[3]
        return match[0]

    return LINK.sub(moved, markdown)


def on_post_build(*, config: MkDocsConfig) -> None:
    """Replace the theme's worker script by ours, and check that pages load no external resources.

    Raises: PluginError with the external addresses, which ends the build.
    """
    site = Path(config.site_dir)
    for path in site.rglob("*.html"):
        ours = os.path.relpath(site / "site" / "worker.js", path.parent)
        path.write_text(path.read_text(encoding="utf-8").replace(WORKER, ours), encoding="utf-8")
    if found := external(site):
        raise PluginError("site: pages load external resources: " + ", ".join(found[:5]) + ". Remove them.")
