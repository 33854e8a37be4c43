"""The walk-through: every line that begins with `->` is true of the tensors printed above it."""

import re
import runpy

import numpy as np
import pytest
from matplotlib.image import imread

from tests.processes import ROOT

NUMBER = r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?"


class Output:
    """Parser of the printed output, which shares no code with the program under test."""

    def __init__(self, text: str) -> None:
        self.tensors: dict[str, np.ndarray] = {}
        self.claims: list[str] = []
        lines = iter(text.splitlines())
        for line in lines:
            if line.startswith("-> "):
                self.claims.append(line[3:])
            elif found := re.fullmatch(r"(.+) (\((?:\d+, ?)*\d*\))", line):
                rows = []
                while row := next(lines, "").split():
                    rows.append([float(number) for number in row])
                shape = tuple(int(n) for n in re.findall(r"\d+", found[2]))
                self.tensors[found[1]] = np.array(rows).reshape(shape)

    def numbers(self, pattern: str) -> list[float]:
        """Returns the numbers of the one claim that matches `pattern`."""
        [claim] = [claim for claim in self.claims if pattern in claim]
        return [float(n) for n in re.findall(NUMBER, claim)]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    png, printed = tmp_path_factory.mktemp("explain") / "maps.png", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda text="": printed.append(str(text)))
        main = runpy.run_path(str(ROOT / "examples" / "explain_attention.py"))["main"]
        main(["--seed", "1", "--png", str(png)])
    assert imread(png).std() > 0.1
    return Output("\n".join(printed))


def softmax(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def close(a, b, atol: float = 2e-5) -> None:
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def test_three_averages_are_one(output):
    assert len(output.claims) == 15, "each claim is checked below, but one that has no number"
    t, triangle = output.tensors, np.tril(np.ones((6, 6))) / np.arange(1, 7)[:, None]
    for name in ("loop", "matrix @ x", "softmax @ x"):
        close(t[name], triangle @ t["x"])
    for name in ("matrix", "softmax of masked zeros"):
        close(t[name], triangle)
    assert output.numbers("three averages differ")[0] < 1e-6


def test_one_head(output):
    t = output.tensors
    close(t["weights"], softmax(np.where(np.tri(6), t["scores"], -np.inf)))
    assert output.numbers("sums to 1")[1] < 1e-6
    assert output.numbers("only to itself") == t["weights"][0].tolist() == [1, 0, 0, 0, 0, 0]
    assert output.numbers("kernels.attention")[0] < 1e-5


def test_maps(output):
    causal, unmasked, cross = (
        output.tensors[f"{name} weights"] for name in ("causal", "unmasked", "cross")
    )
    kept = np.tril(unmasked)  # a mask, and what is left shared out anew
    close(causal, kept / kept.sum(1, keepdims=True), atol=1e-4)
    assert output.numbers("causal: a change of token 3") == [3, 3, 4, 5]
    assert output.numbers("unmasked: a change of token 3") == [3, 0, 1, 2, 3, 4, 5]
    for name, weights in (("a decoder", causal), ("an encoder", unmasked)):
        close(output.numbers(name)[0], np.triu(weights, 1).sum(), atol=1e-4)
    assert output.numbers("cross:") == [6, 9, 6, 9]
    assert cross.shape == (6, 9)


def test_scaling_keeps_the_softmax_from_saturation(output):
    t = output.tensors
    close(t["the same, divided by 4"], t["scores of the first of 1000 sequences"] / 4)
    assert output.numbers("head size") == [16, *[pytest.approx(1, abs=0.05)] * 2]
    [variance, near] = output.numbers("variance of the scores")
    assert (near, variance) == (16, pytest.approx(16, abs=1))
    assert output.numbers("variance of the scaled") == pytest.approx([variance / 16, 1], abs=1e-3)
    weights = [t["softmax"], t["softmax of 8 x scores"], t["softmax of 64 x scores"]]
    for factor, printed in zip((1, 8, 64), weights):
        close(printed, softmax(factor * t["five scores"]))
    largest = [float(w.max()) for w in weights]
    assert output.numbers("largest weight") == pytest.approx(largest, abs=1e-4)
    slopes = [w * (1 - w) for w in largest]
    assert output.numbers("its gradient")[1:] == pytest.approx(slopes, abs=2e-5)
