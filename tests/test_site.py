"""The docs site has every page, each of its links leads to a page of the site, and nothing is loaded from elsewhere."""

from __future__ import annotations

import importlib
import re

import pytest
import typer
import yaml

from refengine.lab import site
from refengine.lab.api_pages import API, api_page, offered
from refengine.lab.docs import pages
from refengine.lab.links import broken
from refengine.lab.tutorials import tutorials


@pytest.fixture(scope="module")
def gathered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    site.main(folder, offline=False)
    return folder


def test_every_page_and_tutorial_is_there(gathered):
    wanted = [page.relative_to(site.ROOT) for page in pages()]
    assert [page for page in wanted if not (gathered / "pages" / page).exists()] == []
    for tutorial in tutorials():
        text = (gathered / "pages" / "tutorials" / f"{tutorial.path.name}.md").read_text(encoding="utf-8")
        assert text.startswith(f"# {tutorial.number} · {tutorial.title}\n") and tutorial.path.name in text


def test_links_lead_to_pages_of_the_site(gathered):
    found = {page: missing for page in (gathered / "pages").rglob("*.md") if (missing := broken(page))}
    assert found == {}


def test_the_navigation_names_pages_that_are_there(gathered):
    made = yaml.safe_load((gathered / "mkdocs.yml").read_text(encoding="utf-8"))
    names = re.findall(r"[\w./-]+\.md", str(made["nav"]))
    assert len(names) > 20 and [name for name in names if not (gathered / "pages" / name).exists()] == []
    guides = {str(page.relative_to(site.ROOT)) for page in (site.ROOT / "docs").rglob("*.md")}
    assert guides <= set(names), "a page that no menu has"


def test_a_folder_of_other_things_is_left_alone(tmp_path, capsys):
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    for folder in (tmp_path, other):
        with pytest.raises(typer.Exit) as stopped:
            site.main(folder, offline=False)
        assert stopped.value.exit_code == 2 and other.read_text() == "mine"
    assert "holds other things" in capsys.readouterr().err


def test_pages_are_gathered_anew(tmp_path):
    folder = tmp_path / "with spaces"
    stale = folder / "pages" / "gone.md"
    stale.parent.mkdir(parents=True)
    stale.write_text("# Gone\n")
    site.main(folder, offline=False)
    assert not stale.exists() and (folder / "mkdocs.yml").exists()


def test_a_site_that_was_not_built_is_said(tmp_path, capsys):
    with pytest.raises(typer.Exit) as stopped:
        site.main(tmp_path, offline=True)
    assert stopped.value.exit_code == 1 and "build the site first" in capsys.readouterr().err


def test_code_is_shown_as_it_is(gathered):
    text = (gathered / "pages/backends/layout.py.md").read_text(encoding="utf-8")
    assert (site.ROOT / "backends/layout.py").read_text(encoding="utf-8").rstrip() in text


def test_a_link_to_a_tutorial_to_come_is_left_as_words(tmp_path):
    one = site.Site(tmp_path)
    assert one.link(site.ROOT / "tutorials/README.md", "77_not_there.py") is None
    assert one.link(site.ROOT / "tutorials/README.md", "not_there.py") == "not_there.py"


@pytest.mark.parametrize("module", API)
def test_the_api_page_has_what_a_module_offers(module):
    names = re.findall(r"^::: (.+)$", api_page(module), re.MULTILINE)
    assert names and names == offered(module)
    for name in names:
        origin, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(origin), last), name
    own = importlib.import_module(module)
    left_out = set(getattr(own, "__all__", [])) - {name.rpartition(".")[2] for name in names}
    assert all(type(getattr(own, name)).__module__.startswith("numba.") for name in left_out), left_out


def test_without_all_a_page_has_what_is_public_and_documented():
    assert offered("refengine.measure.paired")[:2] == [
        "refengine.measure.paired.ORDER",
        "refengine.measure.paired.Interval",
    ]
    assert "refengine.measure.paired.Array" not in offered("refengine.measure.paired")


@pytest.mark.parametrize(
    ("html", "found"),
    [
        ('<script src="https://example.org/a.js"></script>', True),
        ('<link rel="stylesheet" href="//example.org/a.css">', True),
        ("<img alt=x src=https://example.org/a.png>", True),
        ('<a href="https://example.org/">a link is no load</a>', False),
        ('<script src="assets/a.js"></script><img src="a.svg">', False),
    ],
)
def test_what_is_loaded_from_elsewhere_is_found(tmp_path, html, found):
    (tmp_path / "index.html").write_text(html)
    assert bool(site.loads_from_elsewhere(tmp_path)) is found
