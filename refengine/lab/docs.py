"""The generated parts of the Markdown pages: code, output and tables, made of what they show.

    python -m refengine.lab.docs            write them anew
    python -m refengine.lab.docs --check    exit status 1 where a page is not what the code makes

A part stands between ``<!-- KIND arguments -->`` and ``<!-- /KIND -->``, each on its own line:

    source FILE NAME ...    the functions or classes of a Python file
    file FILE               a whole file
    run FILE                what a script prints
    claims FILE             a benchmark's figures
    dialect                 the instructions of the kernel dialect
    demo                    what ``make demo`` prints; written anew only with --demo, which runs it
    tutorials               the tutorials that there are
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from refengine.lab.dialect_table import dialect_table
from refengine.lab.sources import ROOT, DocsError, excerpt
from refengine.lab.tutorials import tutorials

PART = re.compile(r"^<!-- (\w+)((?: [^\n]*)?) -->\n(.*?)^<!-- /\1 -->$", re.MULTILINE | re.DOTALL)
LANGUAGES = {".cu": "cuda", ".py": "python", ".yaml": "yaml"}
DEMO = "compare qwen3.5-tiny --page-size 48 --prompt-rows 256 --prompt @docs/prompt.txt --tokens 32"


def pages() -> list[Path]:
    """The Markdown pages that may have generated parts."""
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "tutorials" / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]


# --- The kinds of parts -------------------------------------------------------------------------------------------------


def source(file: str, *names: str) -> str:
    """Top-level definitions of a Python file, as they stand, decorators too."""
    return fenced("python", "\n\n\n".join(excerpt(file, name).text for name in names))


def whole(file: str) -> str:
    """A file as it stands."""
    return fenced(LANGUAGES[Path(file).suffix], (ROOT / file).read_text(encoding="utf-8").rstrip())


def run(file: str) -> str:
    """What a script prints, run from the top of the repository."""
    return output(file, [sys.executable, file])


def output(name: str, command: list[str]) -> str:
    """A command's standard output. Raises DocsError where it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise DocsError(
            f"{name}: exit status {done.returncode}: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
        )
    return fenced("text", done.stdout.rstrip())


def claims(file: str) -> str:
    """The list ``claims`` of a benchmark's JSON as a table."""
    rows = [
        f"| `{c['name']}` | {c['value']:,} | {c['unit']} |" for c in json.loads((ROOT / file).read_text())["claims"]
    ]
    return "\n".join([f"| {Path(file).name} | value | unit |", "|---|---:|---|", *rows])


def demo() -> str:
    """What ``make demo`` prints."""
    return output("demo", [sys.executable, "-m", "refengine.cli", *DEMO.split()])


def tutorial_list() -> str:
    """A row a tutorial: number, title, the question."""
    rows = [f"| [{t.number}]({t.path.name}) | {t.title} | {t.question} |" for t in tutorials()]
    return "\n".join(["| | tutorial | the question |", "|---|---|---|", *rows])


def fenced(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


KINDS: dict[str, Callable[..., str]] = {
    "source": source,
    "file": whole,
    "run": run,
    "claims": claims,
    "dialect": dialect_table,
    "demo": demo,
    "tutorials": tutorial_list,
}


# --- Pages --------------------------------------------------------------------------------------------------------------


def renewed(text: str, with_demo: bool = False) -> str:
    """A page's text with its parts made anew. Raises DocsError for a kind that there is not."""

    def part(match: re.Match[str]) -> str:
        kind, arguments = match[1], match[2].split()
        if kind not in KINDS:
            raise DocsError(f"<!-- {kind} -->: unknown; there are {', '.join(KINDS)}")
        if kind == "demo" and not with_demo:
            return match[0]
        return f"<!-- {kind}{match[2]} -->\n{KINDS[kind](*arguments)}\n<!-- /{kind} -->"

    return PART.sub(part, text)


def stale(with_demo: bool = False) -> Iterator[tuple[Path, str]]:
    """(page, its new text) of each page that is not up to date."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := renewed(text, with_demo)) != text:
            yield page, new


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit status 1 where a page is stale.")] = False,
    demo: Annotated[bool, typer.Option("--demo", help="Run the demo and write its output, too.")] = False,
) -> None:
    """Write the generated parts of the Markdown pages anew."""
    try:
        found = list(stale(demo))
    except (DocsError, OSError) as problem:
        typer.echo(f"docs: {problem}", err=True)
        raise typer.Exit(2) from None
    for page, text in found:
        typer.echo(f"{page.relative_to(ROOT)}: {'is stale: run python -m refengine.lab.docs' if check else 'written'}")
        if not check:
            page.write_text(text, encoding="utf-8")
    raise typer.Exit(1 if check and found else 0)


if __name__ == "__main__":
    typer.run(main)
