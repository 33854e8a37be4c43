"""The walk-through: the numbers of each line that begins with `->` are what it says."""

import re
import runpy

import pytest

from tests.processes import ROOT

CLAIMS = {
    "sums to 1": [1, pytest.approx(0, abs=1e-6)],
    "kernels.attention": [pytest.approx(0, abs=1e-5)],
    "unmasked: a change of token 3": [3, 0, 1, 2, 3, 4, 5],
    "variance of the scores": [pytest.approx(16, abs=1), 16],
    "variance of the scaled": [pytest.approx(1, abs=0.07), 1],
}


def test_a_claim_is_true(tmp_path, capsys):
    main = runpy.run_path(str(ROOT / "examples" / "explain_attention.py"))["main"]
    main(["--seed", "1", "--png", str(tmp_path / "maps.png")])
    printed = capsys.readouterr().out
    for claim, expected in CLAIMS.items():
        [line] = re.findall(rf"^-> (.*{claim}.*)$", printed, re.M)
        assert [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?", line)] == expected
