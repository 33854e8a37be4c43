"""Profiles of our kernels: the counts of small sizes foretell those of large ones."""

import numpy as np

from fastgpt.kernels.proof.profile import at
from tests.processes import printed_by


def test_a_polynomial_through_counts_is_exact_beyond_64_bit_floats():
    def count(n):
        return np.array([7 * n * n - 3 * n + 2, 10**15 * n + 1])

    values = np.stack([count(n) for n in (3, 4, 5)])
    assert all((at(values, 3, n) == count(n)).all() for n in (0, 3, 1001))


SCRIPT = """
import torch
from fastgpt.kernels.proof.profile import Call, Extrapolation
from fastgpt.kernels.specs import SPECS

for name, arch, problem in (
    ("rotary", 90, {"B": 6, "T": 50, "H": 3, "D": 64}),
    ("rms_norm", 80, {"M": 2511, "N": 768}),
    ("attention", 80, {"B": 3, "T": 696, "H": 1, "D": 16}),
):
    call, done = Call(SPECS[name], problem, torch.bfloat16, arch), {}
    run = Extrapolation(call)
    said, sizes = run.run(), tuple(problem[axis.name] for axis in run.axes)
    call.observe(done)
    same = [(said.pop(key) == done[key].table).all().item() for key in done]
    print(name, sizes in run.counts, said, same)
"""


def test_small_sizes_foretell_every_count_of_an_executed_larger_one():
    kernels = {"rotary": 2, "rms_norm": 3, "attention": 3}
    lines = [f"{op} False {{}} {[True] * number}" for op, number in kernels.items()]
    assert printed_by(SCRIPT).splitlines() == lines


DECODE = """
import torch
from fastgpt.kernels.proof.profile import Call, profile
from fastgpt.kernels.specs import SPECS

problem = {"B": 2, "T": 700, "H": 3, "D": 64}
for x in profile(Call(SPECS["decode_attention"], problem, torch.bfloat16, 90)):
    print(x.config.kernel, x.counters.thread_blocks, x.counters.total("touched"), x.executed)
"""


def test_decode_attention_is_profiled_at_full_size():
    first, second = printed_by(DECODE).splitlines()
    (split, blocks, touched, said), (combine, merged, *_) = first.split(maxsplit=3), second.split()
    assert (split, said) == ("_decode_attention_kernel", "the whole problem")
    assert combine == "_decode_combine_kernel"
    assert int(blocks) > int(merged) == 2 * 3  # splits of each head and sequence
    keys_and_values = 2 * (2 * 700 * 3 * 64) * 2  # bytes
    assert keys_and_values < int(touched) < 1.1 * keys_and_values
