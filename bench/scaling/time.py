"""Time of a training step's collectives and of its computation, by a model of network and GPU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.account.time import GPUS
from bench.scaling.collectives import MACHINE, Collective, Plan
from fastgpt.metrics import flops_per_token
from fastgpt.model_config import ModelConfig

PEAK = next(gpu.flops for gpu in GPUS if gpu.name == "H100")
BUSY = 0.5
"""Share of the peak FLOPs that a step reaches without communication."""
LINK = 0.8
"""Share of a link's rate that collectives reach."""
START_S, OUTSIDE_S, TREE_S = 8.4e-6, 14e-6, 4e-6
"""Seconds of a collective's start, of a hop between machines, and of one inside in a tree."""


@dataclass(frozen=True, slots=True)
class Network:
    """Links of machines with 8 GPUs: bytes per second and direction."""

    name: str
    inside: float
    """Rate from a GPU to the others of its machine."""
    port: float
    """Rate of a port to other machines."""
    ports: int
    """Ports of a machine."""
    hop_s: float
    """Seconds of a ring's hop inside of a machine."""
    source: str


NETWORKS = (
    Network("NVLink, InfiniBand", 450e9, 50e9, 8, 3.4e-6,
            "H100 SXM (900 GB/s of NVLink in both directions together), 400 Gb/s for each GPU"),
    Network("NVLink, RoCE", 450e9, 12.5e9, 8, 3.4e-6,
            "the same machine with 100 Gb/s Ethernet for each GPU"),
    Network("PCIe, Ethernet", 64e9, 12.5e9, 1, 5.7e-6,
            "the same GPU behind PCIe 5.0 x16, with 100 Gb/s for each machine"),
)  # fmt: skip


def seconds(x: Collective, net: Network) -> float:
    """Returns the time of one collective by a ring, or with a tree's latency."""
    local = max(1, min(x.ranks, MACHINE // x.stride))
    machines, rounds = x.ranks // local, 2 if x.op == "all_reduce" else 1
    rate = net.inside
    if machines > 1:  # the other groups of these machines send at the same time
        rate = min(rate, net.ports * net.port * local / MACHINE)
    latency = rounds * ((machines - 1) * OUTSIDE_S + (x.ranks - machines) * net.hop_s)
    if x.op == "all_reduce":
        latency = min(latency, 2 * ((local - 1) * TREE_S + math.log2(machines) * OUTSIDE_S))
    return START_S + latency + x.sent / (LINK * rate)


def exposed_seconds(
    found: Sequence[tuple[str, Collective]], plan: Plan, layers: int, block_s: float, net: Network
) -> float:
    """Returns the communication of a step during which nothing is computed.

    Args:
        found: from `exchange`.
        block_s: seconds of a block's forward; its backward takes twice as long.
    """
    if plan.parallel.kind == "ddp":  # torch.compile hands over all gradients after the backward
        return sum(x.times * seconds(x, net) for _, x in found)
    gather = sum(seconds(x, net) for at, x in found if (at, x.op) == ("block", "all_gather"))
    reduce = sum(seconds(x, net) for at, x in found if at == "block" and x.op != "all_gather")
    once = sum(x.times * seconds(x, net) for at, x in found if at != "block")
    again = gather if plan.parallel.reshard else 0.0
    # the first gather of each pass and the last block's reduction have nothing to hide behind
    forward = gather + (layers - 1) * max(0.0, gather - block_s)
    backward = again + (layers - 1) * max(0.0, again + reduce - 2 * block_s) + reduce
    return once + forward + backward


def compute_seconds(config: ModelConfig, tokens: int) -> tuple[float, float]:
    """Returns the seconds of a step's computation, and of one block's forward."""
    rate = BUSY * PEAK
    total = flops_per_token(config)
    head = 6 * config.padded_vocab * config.dim
    return tokens * total / rate, tokens * (total - head) / 3 / config.num_layers / rate
