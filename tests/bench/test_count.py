"""bench.count without its simulated GPU: the record, its page, and what is refused."""

import json
from dataclasses import replace

import pytest

from bench import count
from fastgpt.config.recipes import RECIPES
from fastgpt.errors import UserError

RECORD = json.loads(count.RECORD.read_text())
OURS = "fastgpt triton"
TOKENS = RECORD["batch"] * RECORD["context"]


def config_of(tokens=TOKENS, **model):
    config = RECIPES[RECORD["recipe"]][1]
    train = replace(config.train, batch_tokens=tokens)
    return replace(config, model=replace(config.model, **model), train=train)


def test_the_page_and_what_is_claimed_are_those_of_the_record():
    assert count.page(RECORD) == count.PAGE.read_text()
    for name, it in RECORD["trainers"].items():
        assert count.recorded(name, config_of()) == it["parts"]  # it follows from the small steps
    sums = {x: count.cells(*it["parts"].values()) for x, it in RECORD["trainers"].items()}
    ratios = [float(a) / float(b) for a, b in zip(sums[OURS], sums["nanogpt"], strict=True)]
    assert [x <= most for x, most in zip(ratios, (0.6, 0.76, 1), strict=True)] == [True] * 3
    assert RECORD["trainers"][OURS]["waits"] == RECORD["trainers"][OURS]["allocations"] == 0


def test_a_step_of_other_sizes_is_foretold_in_both_directions():
    def f(layers, batch):
        row = dict.fromkeys(count.FIELDS, 3 + 5 * layers + 7 * batch + 11 * layers * batch)
        return dict.fromkeys(count.PARTS, row)

    corners = {(layers, batch): f(layers, batch) for layers in (2, 4) for batch in (4, 8)}
    row = count.predicted(corners, config_of(256 * count.TOKENS))["norms"]
    assert row == f(12, 256)["norms"] | {"launches": f(12, 8)["norms"]["launches"]}
    assert count.recorded("llm.c", config_of()) is None
    for changes in ({"tokens": 4 * TOKENS}, {"dim": 1536}, {"vocab_size": 65}):  # 4: more chunks
        assert count.recorded(OURS, config_of(**changes)) is None


@pytest.mark.parametrize("argv", [[], ["--trainers", "eagr"]])
def test_what_cannot_be_counted_is_refused_at_once(argv, monkeypatch):
    monkeypatch.delenv("SIMGPU", raising=False)
    with pytest.raises(UserError, match="is 'eagr': expected" if argv else "expected build/simgpu"):
        count.main(argv)
