"""Tests specific to rotary position embeddings (RoPE); `test_conformance` checks every op."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastgpt.kernels import rotary, runtime
from fastgpt.kernels.rotary import device as rotary_device
from fastgpt.kernels.rotary.spec import KERNEL, ROTARY, shape
from tests.kernels import conformance
from tests.parity import awkward, forward_backward

TYPICAL = ROTARY.problems["grouped"]


@given(data=st.data())
@conformance.examples(max_examples=25)
def test_any_shape(data, device):
    B, T, H, K, pairs = (data.draw(st.integers(1, most)) for most in (3, 24, 6, 6, 40))
    dtype = data.draw(conformance.ANY_DTYPE)
    conformance.parity(ROTARY, shape(B, T, H, K, 2 * pairs), device, dtype)


def test_slices_of_a_projection_are_read_in_place_by_one_launch_each_way(device):
    B, T, H, K, D = TYPICAL.values()
    qkv = awkward(B, T, H + 2 * K, D, device=device).contiguous()
    op = ROTARY.call(rotary, TYPICAL, device)
    with runtime.recording(90) as recorded:
        op(qkv[:, :, :H], qkv[:, :, H : H + K])
    places = [qkv.data_ptr(), qkv[:, :, H:].data_ptr()]
    assert [x.data_ptr() for x in recorded[0].args[:2]] == places
    before = runtime.LAUNCHES[KERNEL]
    forward_backward(lambda qkv: op(*qkv.split((H, K, K), dim=2)[:2]), [qkv])
    assert runtime.LAUNCHES[KERNEL] - before == 2


def test_strides_of_angles_do_not_matter(device):
    inputs = conformance.make_inputs(ROTARY, TYPICAL, device).values()
    cos, sin = ROTARY.options(TYPICAL, device).values()
    want = forward_backward(lambda *qk: rotary(*qk, cos, sin), inputs)
    cos, sin = torch.stack((cos, sin), dim=-1).unbind(-1)
    conformance.assert_same(forward_backward(lambda *qk: rotary(*qk, cos, sin), inputs), want)


def test_angles_beyond_two_billion_are_found(monkeypatch):
    """The last of 2**24 + 8 tokens are read where they are; 32 bits would wrap around at 2**31.

    The interpreter runs the last program alone, and notes addresses that no memory is behind.
    """
    from triton.runtime import interpreter

    T, D, x, offsets = 2**24 + 8, 256, torch.zeros(1), []

    def access(pointers, values, rest, dtype=None):
        offsets.append(pointers.astype(np.int64) - x.data_ptr())
        return rest

    last = interpreter.TensorHandle(np.array([T // 8 - 1], np.int32), interpreter.tl.int32)
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(interpreter, "_interpreter", SimpleNamespace(load=access, store=access))
    monkeypatch.setattr(builder, "create_get_program_id", lambda axis: last)
    launch, args = rotary_device._rotary_kernel[(1,)], (0, D, D, 0, 0, 0, T, 1, 0, D, False)
    launch(x, None, x, x, x, None, *args, **rotary_device.tile(1, 0, D))
    # cosines and sines, then the halves that are read and those that are written
    for found, floats in zip(offsets, (D // 2, D // 2, D, D, D, D), strict=True):
        assert (found.min() // (4 * floats), found.max() // (4 * floats)) == (T - 8, T - 1)
