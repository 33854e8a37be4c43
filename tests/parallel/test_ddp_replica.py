"""DDP's exchange of gradients on gloo: when it begins, in how many pieces, in which format."""

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastgpt.config.config import TrainConfig
from fastgpt.parallel.ddp import replicate


@pytest.fixture
def alone():
    """A group of one rank, whose collectives run like those of several."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def traced(*, compiled=False, **options):
    """Returns the profiler's events of a second step, and the model of eight MiB of weights."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    module: Any = torch.compile(model, backend="aot_eager") if compiled else model
    replica = replicate(module, TrainConfig(**options))
    replica(torch.randn(4, 512)).sum().backward()  # the buckets are made anew afterwards
    model.zero_grad()
    with torch.profiler.profile() as profile:
        replica(torch.randn(4, 512)).square().sum().backward()
    return profile.events(), model


def starts(events, name):
    return [event.time_range.start for event in events if event.name == name]


@pytest.mark.parametrize(("bucket", "pieces"), [(1, 8), (2, 4), (25, 1)])
def test_exchange_of_a_bucket_begins_before_the_backward_ends(alone, bucket, pieces):
    events, _ = traced(ddp_bucket_mb=bucket)
    exchanges, products = starts(events, "c10d::allreduce_"), starts(events, "MmBackward0")
    assert (len(exchanges), len(products)) == (pieces, 8)
    early = sum(exchange < max(products) for exchange in exchanges)
    assert early == pieces - 1


@torch._dynamo.config.patch(optimize_ddp=False)  # as the engine does
def test_compiled_backward_is_over_before_the_first_exchange(alone):
    events, _ = traced(compiled=True, ddp_bucket_mb=1)
    assert len(exchanges := starts(events, "c10d::allreduce_")) == 8
    assert min(exchanges) > max(starts(events, "aten::mm"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bf16_gradients_are_exchanged_where_asked_for(alone, dtype):
    _, model = traced(ddp_dtype=dtype)
    gradients = torch.stack([cast(torch.Tensor, p.grad) for p in model.parameters()])
    assert torch.equal(gradients, gradients.bfloat16().float()) is (dtype == "bf16")
