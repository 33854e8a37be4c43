"""What an op cannot do without: FLOPs of matrix products, and bytes of memory, each element once.

Each function gives {pass: (FLOPs, bytes)}. Attention is counted as everybody counts it, so that
figures compare: 4 B H T^2 D forward, halved where causal, and 2.5 times that backward. What is
computed or read twice because an implementation finds that convenient is not counted.
"""

from typing import Any

Work = dict[str, tuple[float, float]]


def passes(fwd: tuple[float, float], bwd: tuple[float, float]) -> Work:
    """Forward, backward, and both as their sum."""
    return {"fwd": fwd, "bwd": bwd, "both": (fwd[0] + bwd[0], fwd[1] + bwd[1])}


def attention(s: dict[str, Any], size: int) -> Work:
    """q, k, v -> out and one fp32 a query; backward: those and dout -> dq, dk, dv."""
    B, T, H, D = s["B"], s["T"], s["H"], s["D"]
    K = s.get("K", H)
    flops = 4 * B * H * T * T * D / (2 if s.get("causal", True) else 1)
    queries, keys, lse = B * T * H * D * size, B * T * K * D * size, 4 * B * T * H
    read = queries + 2 * keys
    return passes((flops, read + queries + lse), (2.5 * flops, 2 * read + 2 * queries + lse))


def norm(s: dict[str, Any], size: int) -> Work:
    """x -> y; backward: x, dy -> dx. Vectors of N and statistics are left out."""
    n = s["M"] * s["N"] * size
    return passes((0, 2 * n), (0, 3 * n))


def add_norm(s: dict[str, Any], size: int) -> Work:
    """x, residual -> y, sum; backward: sum, dy, dsum -> one gradient for both inputs."""
    n = s["M"] * s["N"] * size
    return passes((0, 4 * n), (0, 4 * n))


def cross_entropy(s: dict[str, Any], size: int) -> Work:
    """Logits -> loss; backward: logits -> gradient. Both at once read the logits once."""
    n = s["M"] * s["V"] * size
    return {"fwd": (0, n), "bwd": (0, 2 * n), "both": (0, 2 * n)}


def linear_cross_entropy(s: dict[str, Any], size: int) -> Work:
    """x, weight -> loss, without logits in memory; backward: the same -> dx, dweight."""
    M, C, V = s["M"], s["C"], s["V"]
    flops, n = 2 * M * C * V, (M * C + V * C) * size
    return {"fwd": (flops, n), "bwd": (2 * flops, 2 * n), "both": (3 * flops, 2 * n)}


def elementwise(s: dict[str, Any], size: int) -> Work:
    """x -> y; backward: dy -> dx."""
    n = s["M"] * s["N"] * size
    return passes((0, 2 * n), (0, 2 * n))


def limit(flops: float, size: float, roof: dict[str, float]) -> tuple[float, str]:
    """(least seconds this can take, `matmul` or `copy`: what binds it).

    Args:
        flops: of matrix products.
        size: bytes moved.
        roof: FLOP/s as `matmul` and bytes/s as `copy`, measured.
    """
    times = {"matmul": flops / roof["matmul"], "copy": size / roof["copy"]}
    bound = max(times, key=lambda name: times[name])
    return times[bound], bound


def bias_act(s: dict[str, Any], size: int) -> Work:
    """x -> y; backward: x, dy -> dx. The bias is left out."""
    n = s["M"] * s["N"] * size
    return passes((0, 2 * n), (0, 3 * n))


def gated(s: dict[str, Any], size: int) -> Work:
    """x -> y, half as wide; backward: x, dy -> dx."""
    n = s["M"] * s["N"] * size
    return passes((0, 1.5 * n), (0, 2.5 * n))


def rotary(s: dict[str, Any], size: int) -> Work:
    """q, k -> both turned; backward: the same of their gradients."""
    n = 2 * s["B"] * s["T"] * s["H"] * s["D"] * size
    return passes((0, 2 * n), (0, 2 * n))


def decode_attention(s: dict[str, Any], size: int) -> Work:
    """One query a head and sequence over its cache; there is no backward."""
    B, T, H, D = s["B"], s["T"], s["H"], s["D"]
    return {"fwd": (4 * B * H * T * D, 2 * B * H * D * (T + 1) * size)}
