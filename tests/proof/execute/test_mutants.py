"""Ten bugs of ten kinds, planted in the compiled code of ten kernels: each must be noticed."""

import json

import pytest

from tests.processes import printed_by

ALIGNED = True
FULL = ("attention", {"B": 1, "T": 64, "H": 1, "D": 16, "causal": False}, "bf16", ALIGNED)
PLANTED = {
    # kind: (arch, kernel, which of the places that the kernel has, the check that launches it)
    "tcgen05.wait deleted": (100, "_attention_fwd_kernel", 1, FULL),
    "wgmma waited for one group late": (90, "_attention_bwd_dq_kernel", 1, FULL),
    "ldmatrix transposed": (80, "_attention_bwd_dkv_kernel", 0, FULL),
    "shuffle's distance changed": (
        90, "_norm_fwd_kernel", 0, ("layer_norm", "masked-tail", "bf16", ALIGNED),
    ),
    "cp.async waited for one group late": (
        80, "_norm_bwd_kernel", 0, ("rms_norm", "masked-tail", "bf16", ALIGNED),
    ),
    "comparison changed": (
        80, "_cross_entropy_fwd_kernel", 2, ("cross_entropy", "mean", "fp32", not ALIGNED),
    ),
    "conversion's operands swapped": (
        90, "_rotary_kernel", 0, ("rotary", "tokens-in-parts", "bf16", ALIGNED),
    ),
    "predicate dropped": (
        80, "_bias_act_fwd_kernel", 0, ("bias_act", "gelu_tanh masked-tail", "bf16", ALIGNED),
    ),
    "store deleted": (
        90, "_bias_act_bwd_kernel", 0, ("bias_act_swiglu", "swiglu no bias", "fp32", ALIGNED),
    ),
    "barrier deleted": (
        80, "_decode_attention_kernel", 1, ("decode_attention", "head-of-64", "bf16", ALIGNED),
    ),
}  # fmt: skip
SCRIPT = """
import json, random, sys
from tests.proof.execute.kinds import sites
from tests.proof.execute.mutants import Check, kernels, outcome

for kind, (arch, name, number, check) in json.loads(sys.argv[1]).items():
    check = Check(*check)
    kernel = next(k for k in kernels(arch, [check]) if k.name == name)
    site = list(sites(kernel.ptx, kind, random.Random(0)))[number]
    verdict = outcome(check, arch, kernel.ptx, site.apply(kernel.ptx))
    print(json.dumps([kind, *verdict]))
"""


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list[str]]:
    """Kind -> (verdict, what was said), from one process without the interpreter."""
    lines = printed_by(SCRIPT, json.dumps(PLANTED)).splitlines()
    return {kind: rest for kind, *rest in map(json.loads, lines)}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_bug_is_noticed(verdicts, kind):
    verdict, said = verdicts[kind]
    assert verdict in ("fault", "wrong result"), f"{verdict} {said}"
    assert said
