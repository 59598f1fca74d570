"""The pages of the docs site, gathered from the repository: what ``make docs`` builds with mkdocs.

    python -m refengine.lab.site FOLDER           gather the pages and mkdocs.yml into FOLDER
    python -m refengine.lab.site --offline SITE   exit status 1 where a built page loads anything from elsewhere

Pages keep their places, so that their links go on to hold. A link to a file of code leads to a page that shows it.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from refengine.lab.api_pages import API, api_page
from refengine.lab.links import relinked
from refengine.lab.sources import ROOT
from refengine.lab.tutorials import Tutorial, tutorials

PICTURES = {".svg", ".png"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".cfg": "ini", ".toml": "toml", ".cu": "cuda"}
LONGEST = 300_000
"""Characters of a file that is shown; a longer one is copied."""
TUTORIAL = re.compile(r"\d\d_\w+\.py")
LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//[^\"'\s>]+")


def written_pages() -> list[Path]:
    """The Markdown pages of the repository that the site has."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tutorials/README.md")]
    return [*top, *sorted((ROOT / "docs").rglob("*.md"))]


class Site:
    """The gathered pages in a folder. waiting: files and folders that a page links to and that have none yet."""

    def __init__(self, out: Path):
        self.out = out
        self.waiting: list[Path] = []
        self.there: set[Path] = {*written_pages(), *(t.path for t in tutorials())}

    def gather(self) -> None:
        """Write every page, then those of what they link to."""
        for page in written_pages():
            self.write(page, page.read_text(encoding="utf-8"))
        for tutorial in tutorials():
            self.write(tutorial.path, tutorial_page(tutorial))
        for module in API:
            self.put(Path("api") / f"{module}.md", api_page(module))
        while self.waiting:
            self.show(self.waiting.pop())

    def write(self, source: Path, text: str) -> None:
        """A page that stands for a file of the repository, its links led to pages of the site."""
        self.put(place(source), relinked(text, lambda link: self.link(source, link)))

    def put(self, name: Path, text: str) -> None:
        path = self.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def link(self, page: Path, link: str) -> str | None:
        """What a page's link is in the site; None for a tutorial that is not there yet. mkdocs finds what else leads nowhere."""
        name, hash_mark, anchor = link.partition("#")
        if not name:
            return link
        target = Path(os.path.normpath(page.parent / name))
        if not target.exists():
            return None if TUTORIAL.fullmatch(target.name) else link
        if target not in self.there:
            self.there.add(target)
            self.waiting.append(target)
        heading = f"{hash_mark}{anchor}" if target.suffix == ".md" else ""
        return os.path.relpath(ROOT / place(target), page.parent) + heading

    def show(self, target: Path) -> None:
        """The page of a file or a folder; a picture and a long file are copied."""
        if target.is_dir():
            self.write(target / "README.md", folder_page(target))
        elif place(target) == target.relative_to(ROOT):
            copy = self.out / place(target)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, copy)
        else:
            self.put(place(target), file_page(target))


def place(target: Path) -> Path:
    """Where the page of a file or folder stands in the site."""
    name = target.relative_to(ROOT)
    if target.is_dir():
        return name / "README.md"
    shown = target.suffix in LANGUAGES or target.suffix in (".txt", "")
    if target.suffix in PICTURES or target.suffix == ".md" or not shown or target.stat().st_size > LONGEST:
        return name
    return name.with_name(f"{name.name}.md")


# --- Pages that are made ------------------------------------------------------------------------------------------------


def unsearched(title: str, text: str) -> str:
    """A page that search leaves out."""
    return f"---\nsearch:\n  exclude: true\n---\n\n# {title}\n\n{text}\n"


def file_page(file: Path) -> str:
    """A file with line numbers."""
    language = LANGUAGES.get(file.suffix, "text")
    code = file.read_text(encoding="utf-8").rstrip()
    return unsearched(str(file.relative_to(ROOT)), f'``````{language} linenums="1"\n{code}\n``````')


def folder_page(folder: Path) -> str:
    """The files of a folder, each with a link."""
    names = sorted(file.name for file in folder.iterdir() if file.suffix in {*LANGUAGES, ".md"} and file.is_file())
    return unsearched(str(folder.relative_to(ROOT)), "\n".join(f"* [{name}]({name})" for name in names))


def tutorial_page(tutorial: Tutorial) -> str:
    """A text notebook as a page: its words and its code, without what the code shows."""
    first, *cells = tutorial.cells
    note = (
        f"This page has the words and the code of the tutorial. Run it to see what the code prints and draws, "
        f"`.venv/bin/python {tutorial.path.relative_to(ROOT)}`, or read the executed notebook that `make tutorials` leaves in "
        f"`build/tutorials`."
    )
    parts = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells]
    return "\n\n".join([first[1], note, *parts]) + "\n"


# --- The site's configuration -------------------------------------------------------------------------------------------


def navigation() -> list[Any]:
    """The tree of pages."""

    def of(*names: str) -> list[str]:
        return [str(place(ROOT / name)) for name in names]

    rest = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs" / "spec").glob("*.md"))
    spec = [name for name in rest if not name.endswith("README.md")]
    return [
        {"Start": "README.md"},
        {"Paging": "docs/paging.md"},
        {"Tutorials": ["tutorials/README.md", *({f"{t.number} {t.title}": str(place(t.path))} for t in tutorials())]},
        {
            "Guides": of(
                "docs/add_a_model.md",
                "docs/add_a_backend.md",
                "docs/port_a_kernel.md",
                "docs/debugging.md",
                "CONTRIBUTING.md",
            )
        },
        {"Dialect": "docs/dialect.md"},
        {"Faults": "docs/faults.md"},
        {"Specification": ["docs/spec/README.md", *spec]},
        {"API": [{module: f"api/{module}.md"} for module in API]},
    ]


def configuration(pages: Path, site: Path) -> dict[str, Any]:
    """What the repository's mkdocs.yml does not say."""
    return {
        "INHERIT": str(ROOT / "mkdocs.yml"),
        "docs_dir": str(pages.resolve()),
        "site_dir": str(site.resolve()),
        "nav": navigation(),
    }


def loads_from_elsewhere(site: Path) -> list[str]:
    """What pages of a built site would fetch from other hosts, with the page."""
    found = []
    for page in sorted(site.rglob("*.html")):
        for match in LOADED.finditer(page.read_text(encoding="utf-8")):
            if 'rel="canonical"' not in match[0]:
                found.append(f"{page.relative_to(site)}: {match[0]}")
    return found


def gathered_before(folder: Path) -> bool:
    """Whether a folder may be emptied: it is not there, or has nothing but what is gathered."""
    if not folder.exists():
        return True
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= {"pages", "mkdocs.yml"}


def main(
    folder: Annotated[Path, typer.Argument(help="Where the pages go; of --offline, the built site.")],
    offline: Annotated[
        bool, typer.Option("--offline", help="Look for what a built site loads from elsewhere.")
    ] = False,
) -> None:
    """Gather the pages of the docs site, or look for what a built one loads from elsewhere."""
    if offline:
        found = loads_from_elsewhere(folder)
        if not (folder / "index.html").exists():
            found.append(f"{folder}: has no index.html; build the site first")
        for line in found:
            typer.echo(line, err=True)
        raise typer.Exit(1 if found else 0)
    if not gathered_before(folder):
        typer.echo(f"site: {folder}: holds other things than gathered pages; name a new folder", err=True)
        raise typer.Exit(2)
    shutil.rmtree(folder, ignore_errors=True)
    Site(folder / "pages").gather()
    text = yaml.safe_dump(configuration(folder / "pages", ROOT / "site"), sort_keys=False, allow_unicode=True)
    (folder / "mkdocs.yml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
