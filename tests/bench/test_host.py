"""Host benchmark: both ways of calling an op are taken, and no kernel runs."""

from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench import host
from fastgpt.kernels import layer_norm
from fastgpt.kernels.runtime import recording
from tests.parity import launches


def test_each_way_is_timed_and_nothing_runs():
    with launches():
        rows = host.time_host(host.Host(calls=1, rounds=2))
    assert len(rows) == 2 * 2 * 3
    assert {row["implementation"] for row in rows} == {"straight", "dispatcher", "pytorch"}
    assert all(row["seconds"]["p50"] > 0 for row in rows)


def test_the_dispatcher_is_taken_only_where_it_is_asked_for():
    names = set()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.add(str(func))
            return func(*args, **(kwargs or {}))

    with Seen(), recording(90):
        x = torch.ones(2, 16)
        for listens in (True, False):
            with mock.patch("fastgpt.kernels.runtime._nobody_listens", return_value=listens):
                layer_norm(x, x[0])
            assert any("fastgpt" in name for name in names) is not listens
