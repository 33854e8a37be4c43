"""bench.count without its simulated GPU: a step of other sizes is foretold in both directions."""

from dataclasses import replace

from bench import count
from fastgpt.config.recipes import RECIPES


def test_a_step_of_other_sizes_is_foretold_in_both_directions():
    def f(layers, batch):
        row = dict.fromkeys(count.FIELDS, 3 + 5 * layers + 7 * batch + 11 * layers * batch)
        return dict.fromkeys(count.PARTS, row)

    corners = {(layers, batch): f(layers, batch) for layers in (2, 4) for batch in (4, 8)}
    config = RECIPES["gpt2-124m"][1]
    train = replace(config.train, batch_tokens=256 * count.TOKENS)
    row = count.predicted(corners, replace(config, train=train))["norms"]
    assert row == f(12, 256)["norms"] | {"launches": f(12, 8)["norms"]["launches"]}
