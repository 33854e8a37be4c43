"""bench.count without its simulated GPU: the record and its page."""

import json
from dataclasses import replace

from bench import count
from fastgpt.config.recipes import RECIPES

RECORD = json.loads(count.RECORD.read_text())
OURS = "fastgpt triton"


def config_of(tokens=16_384):
    config = RECIPES[RECORD["recipe"]][1]
    train = replace(config.train, batch_tokens=tokens)
    return replace(config, train=train)


def test_the_page_and_what_is_claimed_are_those_of_the_record():
    assert count.page(RECORD) == count.PAGE.read_text()
    for it in RECORD["trainers"].values():  # the whole step follows from the small ones
        corners = {tuple(map(int, at.split(", "))): x for at, x in it["corners"].items()}
        assert count.predicted(corners, config_of()) == it["parts"]
    sums = {x: count.cells(*it["parts"].values()) for x, it in RECORD["trainers"].items()}
    launches, moved, _ = (float(a) / float(b) for a, b in zip(sums[OURS], sums["nanogpt"]))
    assert (launches <= 0.6, moved <= 0.76) == (True, True)
    assert RECORD["trainers"][OURS]["waits"] == RECORD["trainers"][OURS]["allocations"] == 0


def test_a_step_of_other_sizes_is_foretold_in_both_directions():
    def f(layers, batch):
        row = dict.fromkeys(count.FIELDS, 3 + 5 * layers + 7 * batch + 11 * layers * batch)
        return dict.fromkeys(count.PARTS, row)

    corners = {(layers, batch): f(layers, batch) for layers in (2, 4) for batch in (4, 8)}
    row = count.predicted(corners, config_of(256 * count.TOKENS))["norms"]
    assert row == f(12, 256)["norms"] | {"launches": f(12, 8)["norms"]["launches"]}
