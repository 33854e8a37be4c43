"""The page of versions is that of its table, which names the pinned pair."""

import re
import tomllib

from tests import versions
from tests.processes import ROOT


def test_the_page_is_current():
    text = versions.PAGE.read_text(encoding="utf-8")
    assert text == versions.page(), "run python -m tests.versions"


def test_the_pinned_pair_is_that_of_the_constraints():
    table = tomllib.loads(versions.TABLE.read_text(encoding="utf-8"))
    (pinned,) = (pair for pair in table["pair"] if pair.get("pinned"))
    pins = dict(
        re.findall(r"^(torch|triton)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    )
    assert {name: pinned[name] for name in pins} == pins
