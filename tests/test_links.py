"""A link leads to a file, a heading or a line, or it is found; what stands in code is none."""

from __future__ import annotations

import pytest

from refengine.lab.links import anchors, broken, links, relinked, slug

PAGE = """# A page

See [b](b.md#the-2-rules-of-it), [twice](b.md#again-1), [line](code.py#L2), [self](#a-page), [out](https://example.org/x#y).

```text
[not a link](nowhere.md)
```

`[nor this](nowhere.md)` and ![a picture](folder/picture.svg)
"""
OTHER = "## The 2 rules of `it`\n\n## Again\n\n```python\n# No heading\n```\n\n## Again\n"


@pytest.fixture
def page(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/picture.svg").write_text("")
    (tmp_path / "b.md").write_text(OTHER)
    (tmp_path / "code.py").write_text("x = 1\ny = 2\n")
    path = tmp_path / "a.md"
    path.write_text(PAGE)
    return path


def test_links_that_lead_somewhere(page):
    assert len(links(PAGE)) == 5 and broken(page) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("b.md#the-2-rules-of-it", "c.md#the-2-rules-of-it"),
        ("b.md#the-2-rules-of-it", "b.md#the-rules"),
        ("b.md#again-1", "b.md#again-2"),
        ("b.md#again-1", "b.md#no-heading"),
        ("code.py#L2", "code.py#L3"),
        ("#a-page", "#another-page"),
        ("folder/picture.svg", "picture.svg"),
        ("folder/picture.svg", "folder#heading"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(page, right, wrong):
    page.write_text(PAGE.replace(f"({right})", f"({wrong})"))
    assert broken(page) == [wrong]


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("What a straddling item costs", "what-a-straddling-item-costs"),
        ("2. Say what `it` may know", "2-say-what-it-may-know"),
        ("A/A: ask, don't guess", "aa-ask-dont-guess"),
        ("snake_case – und Größe", "snake_case--und-größe"),
    ],
)
def test_anchors_are_githubs(heading, anchor):
    assert slug(heading) == anchor and anchors(f"# {heading}\n") == {anchor}


def test_a_link_in_a_heading_counts_by_its_words():
    assert anchors("## See [the page](page.md)\n") == {"see-the-page"}


def test_links_are_replaced_outside_of_code():
    changed = relinked(PAGE, lambda link: None if link == "code.py#L2" else f"../{link}")
    assert "[b](../b.md#the-2-rules-of-it)" in changed and ", line, " in changed
    assert "[out](https://example.org/x#y)" in changed and "[not a link](nowhere.md)" in changed
    assert relinked("[`code`](a.md)", lambda link: "b.md") == "[`code`](b.md)"
