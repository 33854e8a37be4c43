"""Explains attention with small examples in numbers.

    python examples/explain_attention.py [--png attention.png] [--seed 0]

Each part prints small tensors, then lines that begin with `->` and say what they show, with numbers
computed on the spot. They hold for every seed. The attention maps are drawn into the PNG.
"""

import argparse
import math

import torch
from torch import Tensor

from fastgpt.kernels import attention

T, D = 6, 16
"""Number of tokens and head size in the examples."""


def show(name: str, tensor: Tensor) -> None:
    """Prints the name and shape of a tensor and its numbers, one row per line."""
    rows = tensor if tensor.dim() == 2 else tensor[None]
    print(f"{name} {tuple(tensor.shape)}")
    for row in rows.tolist():
        print(" ".join(f"{value:9.5f}" for value in row))
    print()


def say(text: str) -> None:
    """Prints a statement about the numbers above."""
    print(f"-> {text}")


def max_difference(a: Tensor, b: Tensor) -> float:
    """Returns the largest absolute difference of two tensors."""
    return (a - b).abs().max().item()


def running_averages() -> None:
    print("\n=== 1. The average over the past, in three ways\n")
    x = torch.randn(T, 2)
    looped = torch.stack([x[: t + 1].mean(0) for t in range(T)])
    triangle = torch.ones(T, T).tril()
    weights = triangle / triangle.sum(1, keepdim=True)
    masked = torch.zeros(T, T).masked_fill(triangle == 0, -math.inf)
    softmax = masked.softmax(-1)
    show("x", x)
    show("loop", looped)
    show("matrix", weights)
    show("matrix @ x", weights @ x)
    show("softmax of masked zeros", softmax)
    show("softmax @ x", softmax @ x)
    difference = max(max_difference(looped, weights @ x), max_difference(looped, softmax @ x))
    say(f"the three averages differ by at most {difference:.1e}: they are one computation")
    say("attention is the third form, with scores from the data in place of the zeros")


def one_head() -> None:
    print("\n=== 2. One attention head\n")
    q, k, v = torch.randn(3, T, D)
    scores = q @ k.T / math.sqrt(D)
    masked = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    weights = masked.softmax(-1)
    out = weights @ v
    show("scores", scores)
    show("weights", weights)
    show("the first columns of out", out[:, :4])
    fused = attention(*(t[None, :, None] for t in (q, k, v)))[0, :, 0]
    say(f"every row of weights sums to 1, to {max_difference(weights.sum(1), torch.ones(T)):.1e}")
    first = " ".join(f"{value:.2f}" for value in weights[0].tolist())
    say(f"the first token attends only to itself: its weights are {first}")
    say(f"kernels.attention gives the same out, to {max_difference(out, fused):.1e}")


def maps() -> dict[str, Tensor]:
    print("\n=== 3. Causal, unmasked, and across two sequences\n")
    x, other = torch.randn(T, D), torch.randn(T + 3, D)
    project = [torch.randn(D, D) / math.sqrt(D) for _ in range(3)]

    def attend(x: Tensor, source: Tensor, causal: bool, v: Tensor | None = None) -> Tensor:
        v = source @ project[2] if v is None else v
        q, k, v = (t[None, :, None] for t in (x @ project[0], source @ project[1], v))
        return attention(q, k, v, causal=causal)[0, :, 0]

    cases = {"causal": (x, True), "unmasked": (x, False), "cross": (other, False)}
    found = {}
    for name, (source, causal) in cases.items():
        # with unit vectors as values, the output is the weights
        found[name] = attend(x, source, causal, v=torch.eye(len(source), D))[:, : len(source)]
        show(f"{name} weights", found[name])
    for name in ("causal", "unmasked"):
        changed = x.clone()
        changed[3] += 1
        moved = attend(changed, changed, cases[name][1]) - attend(x, x, cases[name][1])
        places = moved.abs().amax(1).gt(1e-6).nonzero().flatten().tolist()
        say(f"{name}: a change of token 3 changes the outputs {places}")
    future = found["causal"].triu(1).sum().item()
    say(f"causal (a decoder): the weights above the diagonal sum to {future:.5f}")
    future = found["unmasked"].triu(1).sum().item()
    say(f"unmasked (an encoder): the weights above the diagonal sum to {future:.5f}")
    say(f"cross: {T} queries over {T + 3} keys of another sequence, {T} x {T + 3} weights")
    return found


def scaling() -> None:
    print("\n=== 4. Why scores are divided by the root of the head size\n")
    q, k = torch.randn(2, 1000, T, D)
    scores = q @ k.transpose(1, 2)
    show("scores of the first of 1000 sequences", scores[0])
    show("the same, divided by 4", scores[0] / math.sqrt(D))
    say(f"head size {D}: over all sequences the variance of q is {q.var():.4f}, of k {k.var():.4f}")
    say(f"variance of the scores {scores.var():.4f}: near {D}")
    say(f"variance of the scaled scores {(scores / math.sqrt(D)).var():.4f}: near 1")


def saturation() -> None:
    print("\n=== 5. A softmax of large scores saturates\n")
    scores = torch.tensor([0.1, -0.2, 0.3, -0.2, 0.5])
    even, sharp, extreme = ((factor * scores).softmax(-1) for factor in (1, 8, 64))
    show("five scores", scores)
    show("softmax", even)
    show("softmax of 8 x scores", sharp)
    show("softmax of 64 x scores", extreme)
    say(f"the largest weight grows from {even.max():.4f} to {sharp.max():.4f}, {extreme.max():.4f}")
    slopes = [(w.max() * (1 - w.max())).item() for w in (even, sharp, extreme)]
    slopes = "{:.5f} to {:.5f}, {:.5f}".format(*slopes)
    say(f"its gradient with respect to its own score, w (1 - w), goes from {slopes}")


def draw(weights: dict[str, Tensor], path: str) -> None:
    """Draws attention maps side by side into a PNG file."""
    from matplotlib.figure import Figure  # without pyplot: no display is looked for

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    images = [
        axes.imshow(tensor.numpy(), vmin=0, vmax=1)
        for axes, tensor in zip(figure.subplots(1, len(weights)), weights.values())
    ]
    for axes, name in zip(figure.axes, weights):
        axes.set(title=name, xlabel="key", ylabel="query")
    figure.colorbar(images[0], ax=figure.axes)
    figure.savefig(path, dpi=120, format="png")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--png", default="attention.png")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    torch.manual_seed(arguments.seed)
    running_averages()
    one_head()
    weights = maps()
    scaling()
    saturation()
    draw(weights, arguments.png)
    print(f"\nthe attention maps of part 3 are drawn in {arguments.png}")


if __name__ == "__main__":
    main()
