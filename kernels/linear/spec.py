"""Spec of `linear`, which has no kernel: on a CPU it chooses between PyTorch's libraries."""

import math

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by

from ..spec import Make, Problem, Spec, Work, rows, work
from .op import linear


def inputs(s: Problem, make: Make) -> dict[str, Tensor]:
    return {
        "x": make(*rows(s), s["I"]),
        "weight": make(s["O"], s["I"]),
        **({"bias": make(s["O"])} if s.get("bias") else {}),
    }


def least_work(s: Problem, itemsize: int) -> Work:
    """Counts one product in the forward and two in the backward, each operand moved once."""
    M, N, K = math.prod(rows(s)), s["O"], s["I"]
    bytes_ = (M * K + N * K + M * N) * itemsize
    return work((2 * M * N * K, bytes_), (4 * M * N * K, 2 * bytes_))


LINEAR = Spec(
    name="linear",
    op=linear,
    ref=F.linear,
    eager=F.linear,
    inputs=inputs,
    launches=lambda s: (),  # it has no kernel
    variants=lambda arch: iter(()),
    work=least_work,
    terms=lambda s: max(math.prod(rows(s)), s["I"], s["O"]),  # oneDNN's sums are one chain
    problems={
        "wider": {"M": (3, 67), "I": 192, "O": 320, "bias": True},
        "narrower": {"M": 201, "I": 320, "O": 192, "bias": True},
        "no bias": {"M": 1, "I": 1024, "O": 1031},
        "small": {"M": (2, 3), "I": 5, "O": 7, "bias": True},
    },
    sizes={
        "cpu": {
            "shakespeare-char": {"M": 4096, "I": 384, "O": 1536},
            "gpt2-124m": {"M": 1024, "I": 3072, "O": 768, "bias": True},
            "gpt2-124m-row": {"M": 1, "I": 768, "O": 50_304},
        },
        "cuda": {},
    },
    exempt={
        "opcheck_passes": "it registers no op of its own",
        "compiles_once": "under torch.compile it is F.linear",
        "bad_arguments_are_named": "they are left to F.linear",
        "a_second_derivative_raises": "F.linear has one",
        "offsets_may_pass_32_bits": "no kernel of ours computes an offset",
        "strides_of_gradients_do_not_matter": "a BLAS adds up in another order",
        "the_reference_runs_where_kernels_do_not": "compiled, it adds up in another order",
    },
)
SPECS = (LINEAR,)
