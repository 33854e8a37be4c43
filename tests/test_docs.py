"""Links between the pages in Markdown lead somewhere."""

import re
from pathlib import Path

import pytest

from tests.commands import PAGES, ROOT

BLOCK = re.compile(r"^```.*?^```", re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The anchors of `page`: GitHub's names of its headings."""
    headings = re.findall(r"^#+ (.*)", BLOCK.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    """Relative links of `page` to files or headings that do not exist."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text)
    dead = []
    for link in filter(None, (a or b for a, b in links)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if re.match(r"\w+:", link):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda p: p.name)
def test_every_relative_link_leads_to_a_file_and_a_heading(page):
    assert dead_links(page) == []


def test_nothing_says_to_install_another_project():
    """The package index has a `fastgpt`, which is not ours."""
    for page in [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("fastgpt/**/*.py")]:
        text = " ".join(page.read_text(encoding="utf-8").split())
        assert not re.search(r"\binstall (-\S+ )*['\"]?fastgpt(?![-_\w])", text), page


def test_dead_links_are_found(tmp_path):
    page = tmp_path / "a.md"
    page.write_text("# A `b`: c\n[x](a.md#a-b-c) [y](#no) [z](no.md) [w](https://example.org/no)\n")
    assert dead_links(page) == ["#no", "no.md"]
