"""The documentation as a site (`make docs`): nothing is missing in it, and it needs no network."""

import re
import sys
from html import unescape
from pathlib import Path

import pytest

from tests import api
from tests.processes import ROOT, ended

pytest.importorskip("sphinx", reason="the extra docs is not installed")

REPOSITORY = "https://example.org/fastgpt/blob/main/"
ADDRESS = re.compile(r'<(\w+)[^>]* (?:href|src)="([^"]*)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("docs") / "site"
    [line] = re.findall(r"-m (sphinx .*) \. build/docs", (ROOT / "Makefile").read_text())
    words = line.replace("$(REPOSITORY)", REPOSITORY[:-1]).replace("build/doctrees", f"{out}-trees")
    done = ended(sys.executable, "-m", *words.split(), ROOT, out, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return out


def test_a_page_asks_for_no_outside_address_and_its_links_lead_somewhere(site):
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert len(pages) > 50
    for path, text in pages.items():
        for tag, address in ADDRESS.findall(text):
            place, _, anchor = unescape(address).partition("#")
            target = (path.parent / place.partition("?")[0]).resolve() if place else path
            if place.startswith(REPOSITORY):
                good = (ROOT / place.removeprefix(REPOSITORY)).exists()
            elif re.match(r"\w+:|//", place):
                good = tag == "a"
            else:
                good = target.is_file() and (not anchor or f'id="{anchor}"' in pages[target])
            assert good, (path.name, tag, address)


def test_the_reference_has_the_docstring_of_every_public_name(site):
    page = (site / "docs" / "api.html").read_text(encoding="utf-8")
    for name in (*api.FUNCTIONS, *api.PARTS["Kernels"]):
        assert f'<dt class="sig sig-object py" id="fastgpt.{name}">' in page, name
