"""bench.count without its simulated GPU: what it foretells, and what its record holds."""

import json
from dataclasses import replace

import pytest

from bench import count
from fastgpt.config.recipes import RECIPES


def config_of(recipe, tokens):
    config = RECIPES[recipe][1]
    return replace(config, train=replace(config.train, batch_tokens=tokens))


@pytest.mark.parametrize("trainer", ["fastgpt triton", "nanogpt"])
def test_the_whole_step_of_the_record_follows_from_the_small_ones(trainer):
    record = json.loads(count.RECORD.read_text())
    it = record["trainers"][trainer]
    corners = {tuple(map(int, at.split(", "))): x for at, x in it["corners"].items()}
    assert count.predicted(corners, config_of(record["recipe"], 16_384)) == it["parts"]


def test_a_step_of_other_sizes_is_foretold_in_both_directions():
    def f(layers, batch):
        row = dict.fromkeys(count.FIELDS, 3 + 5 * layers + 7 * batch + 11 * layers * batch)
        return dict.fromkeys(count.PARTS, row)

    corners = {(layers, batch): f(layers, batch) for layers in (2, 4) for batch in (4, 8)}
    row = count.predicted(corners, config_of("gpt2-124m", 256 * count.TOKENS))["norms"]
    assert row == f(12, 256)["norms"] | {"launches": f(12, 8)["norms"]["launches"]}
