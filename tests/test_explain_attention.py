"""The walk-through: the numbers of each line that begins with `->` are what it says."""

import re
import runpy

import numpy as np
import pytest
from matplotlib.image import imread

from tests.processes import ROOT

NUMBER = r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?"
CLAIMS = {
    "three averages differ": [pytest.approx(0, abs=1e-6)],
    "attention is the third form": [],
    "sums to 1": [1, pytest.approx(0, abs=1e-6)],
    "only to itself": [1, 0, 0, 0, 0, 0],
    "kernels.attention": [pytest.approx(0, abs=1e-5)],
    "causal: a change of token 3": [3, 3, 4, 5],
    "unmasked: a change of token 3": [3, 0, 1, 2, 3, 4, 5],
    "a decoder": [0],
    "cross:": [6, 9, 6, 9],
    "head size": [16, pytest.approx(1, abs=0.05), pytest.approx(1, abs=0.05)],
    "variance of the scores": [pytest.approx(16, abs=1), 16],
    "variance of the scaled": [pytest.approx(1, abs=0.07), 1],
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    png, lines = tmp_path_factory.mktemp("explain") / "maps.png", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda text="": lines.append(str(text)))
        main = runpy.run_path(str(ROOT / "examples" / "explain_attention.py"))["main"]
        main(["--seed", "1", "--png", str(png)])
    assert imread(png).std() > 0.1
    return "\n".join(lines)


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_is_true(claim, printed):
    [line] = re.findall(rf"^-> (.*{claim}.*)$", printed, re.M)
    assert [float(number) for number in re.findall(NUMBER, line)] == CLAIMS[claim]


def test_the_softmax_saturates_as_its_printed_scores_say(printed):
    scores = np.float64(re.search(r"^five scores \(.*\)\n(.*)$", printed, re.M)[1].split())
    weights = [
        np.exp(factor * scores).max() / np.exp(factor * scores).sum() for factor in (1, 8, 64)
    ]
    for claim, expected in (
        ("largest weight", weights),
        ("its gradient", [w * (1 - w) for w in weights]),
    ):
        [line] = re.findall(rf"^-> (.*{claim}.*)$", printed, re.M)
        found = [float(number) for number in re.findall(NUMBER, line)]
        assert found[-3:] == pytest.approx(expected, abs=1e-3)
