"""Links of Markdown pages: which there are, the anchors that headings make, and the links that lead nowhere."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

BLOCK = re.compile(r"^(`{3,}|~{3,}).*?^\1`*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(rf"{BLOCK.pattern}|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\[[^][]*\])\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+)$", re.MULTILINE)
OUTSIDE = re.compile(r"[a-z]+:")


def slug(heading: str, separator: str = "-") -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def anchors(text: str) -> set[str]:
    """The anchors of a page. Where a heading stands again, it gets a number."""
    times: Counter[str] = Counter()
    found = set()
    for heading in HEADING.findall(BLOCK.sub("", text)):
        name = slug(LINK.sub(r"\1", heading))
        found.add(f"{name}-{times[name]}" if times[name] else name)
        times[name] += 1
    return found


def links(text: str) -> list[str]:
    """The relative links of a page, outside of code."""
    targets = [target for _, target in LINK.findall(CODE.sub("", text))]
    return [target for target in targets if not OUTSIDE.match(target)]


def broken(page: Path) -> list[str]:
    """The relative links of a page that lead to no file, to no heading of a page or to no line of another file."""
    return [link for link in links(page.read_text(encoding="utf-8")) if not leads(page, link)]


def leads(page: Path, link: str) -> bool:
    """Whether a relative link of a page leads somewhere."""
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    if not target.exists() or not anchor:
        return target.exists()
    text = target.read_text(encoding="utf-8") if target.is_file() else ""
    if target.suffix == ".md":
        return anchor in anchors(text)
    line = re.fullmatch(r"L(\d+)", anchor)
    return bool(line and 1 <= int(line[1]) <= len(text.splitlines()))


def relinked(text: str, new: Callable[[str], str | None]) -> str:
    """A page, each relative link outside of code replaced by what ``new`` makes of it; None leaves the words without a link."""
    kept: list[str] = []

    def hide(match: re.Match[str]) -> str:
        kept.append(match[0])
        return f"\0{len(kept) - 1}\0"

    def link(match: re.Match[str]) -> str:
        target = match[2] if OUTSIDE.match(match[2]) else new(match[2])
        return match[1][1:-1] if target is None else f"{match[1]}({target})"

    changed = LINK.sub(link, CODE.sub(hide, text))
    return re.sub("\0(\\d+)\0", lambda match: kept[int(match[1])], changed)
