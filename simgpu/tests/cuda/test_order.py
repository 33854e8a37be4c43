"""Faults that a GPU would not report: each is planted, is reported, and is gone once mended."""

import pytest

PROGRAM = """
import ctypes, torch, triton, triton.language as tl
from types import SimpleNamespace
main, side, event = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Event()
cuda = ctypes.CDLL("libcuda.so.1")
runtime = ctypes.CDLL("libcudart.so." + torch.version.cuda[:2])
pinned, at = torch.ones(1000).pin_memory(), ctypes.c_void_p()

def stream(flags):
    runtime.cudaStreamCreateWithFlags(ctypes.byref(at), flags)
    return torch.cuda.ExternalStream(at.value)

@triton.jit
def twice(x, out, begin, n):
    at = begin + tl.arange(0, 512)
    tl.store(out + at, 2 * tl.load(x + at, at < n), at < n)

def go(mended):
    x, y = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")
    side.wait_stream(main)
    {}
    torch.cuda.synchronize()

go(True)
print("MENDED")
try:
    go(False)
except Exception as error:
    print("REPORTED", error)
"""


def _is_reported(simulated, body: str, report: str) -> str:
    said = simulated(PROGRAM.format(body.replace("\n", "\n    ")))
    for part in ("MENDED", "REPORTED", *report.split("|")):
        assert part in said, said
    return said


@pytest.mark.parametrize(
    ("work", "mend", "use", "report"),
    [
        ("x.mul_(2)", "main.wait_stream(side)", "x.sum()",
         "aten::sum on the default stream reads|which aten::mul_ on stream 0x|writes"),
        ("x + 1", "side.synchronize()", "x.zero_()",
         "aten::zero_ on the default stream writes|which aten::add on stream 0x|reads"),
        ("event.record(); x.mul_(2)", "event.record(side)", "main.wait_event(event); x.cpu()",
         "copy to the host on the default stream reads|which aten::mul_ on stream 0x"),
        ("x.mul_(2); event.record()", "[*iter(event.query, True)]", "x.sum()", "which aten::mul_"),
        ("x = pinned.to('cuda', non_blocking=True)", "main.wait_stream(side)", "x + 1",
         "aten::add on the default stream reads|which copy to the device on stream 0x"),
        ("x + 1", "x.record_stream(side)", "del x; torch.zeros(1000, device='cuda')",
         "which aten::add on stream 0x|for a tensor that is freed since, without record_stream"),
        ("x.view(100, 10)[:, :5].mul_(2)", "0", "x.view(100, 10)[:, 5 if mended else 4:].sum(0)",
         "aten::sum on the default stream reads|which aten::mul_ on stream 0x"),
        ("twice[(1,)](x, y, 0, 512)", "0", "twice[(1,)](x, y, 512 if mended else 400, 1000)",
         "twice on the default stream writes|which twice on stream 0x"),
        ("0", "0", "with torch.cuda.stream(stream(not mended)): x.mul_(2)",
         "aten::mul_ on stream 0x|which aten::fill_ on the default stream writes"),
    ],
    ids=["write, read", "read, write", "early event", "event asked", "copy", "reused block",
         "columns", "Triton", "blocking stream"],
)  # fmt: skip
def test_work_that_nothing_orders_is_an_error(simulated, work, mend, use, report):
    body = f"with torch.cuda.stream(side):\n    {work}\nif mended:\n    {mend}\n{use}"
    said = _is_reported(simulated, body, "simgpu: race: |" + report)
    assert said.count(" in go < ") >= 2


@pytest.mark.parametrize(
    ("fault", "report"),
    [
        ("x.untyped_storage().resize_(4000 if mended else 0); x + 1",
         "aten::add uses memory that was freed: a tensor takes 4000 bytes of 0"),
        ("p = SimpleNamespace(data_ptr=(lambda p: lambda: p)(x.data_ptr()), dtype=x.dtype)\n"
         "x = x if mended else None; twice[(1,)](p, y, 0, 512)",
         "kernel twice failed: FaultError: twice_param_0 points to memory that was freed"),
        ("cuda.cuMemAlloc_v2(ctypes.byref(at), 4096); mended or cuda.cuMemFree_v2(at)\n"
         "assert not cuda.cuMemsetD8Async(at, 0, 4096, None)",
         "fill uses 0x|which was freed or never allocated"),
        ("x = torch.empty(99, device='cuda'); x[mended ^ 1:].fill_(1); x.sum()",
         "aten::sum depends on memory at 0x|that nobody has written"),
        ("x = torch.empty((), device='cuda'); mended and x.zero_(); x.item()", "item depends on"),
        ("pinned.copy_(x, non_blocking=True); mended and main.synchronize(); pinned[0] += 5",
         "race: the pinned memory at 0x|changed before the copy to it was waited for|snippet.py:"),
        ("pinned.to('cuda', non_blocking=True); mended and main.synchronize(); pinned[0] += 5",
         "changed before the copy from it was waited for|snippet.py:|an illegal memory access was"),
    ],
    ids=["resized", "address", "cudaFree", "sum", "item", "copy to", "copy from"],
)  # fmt: skip
def test_memory_that_must_not_be_touched_is_an_error(simulated, fault, report):
    _is_reported(simulated, fault, report)


def test_devices_have_default_streams_of_their_own(simulated):
    text = """
import torch
x = torch.ones(1000, device="cuda:0").to("cuda:1")
print((x + 1).sum().item(), (x * 2).to("cuda:0", non_blocking=True).sum().item())
"""
    said = simulated(text, flags="--gpus 2")
    assert said.split() == ["2000.0", "2000.0"]


def test_waits_are_told_by_their_lines(simulated):
    said = simulated("""
import simgpu, torch
x, pinned = torch.ones(4, device="cuda"), torch.ones(4).pin_memory()
torch.cuda.synchronize()
before = simgpu.waits()
x.sum().item()
x[x > 0]
torch.ones(4).to("cuda")
torch.ones(4).to("cuda", non_blocking=True)
pinned.to("cuda", non_blocking=True)
torch.cuda.synchronize()
for line, n in (simgpu.waits() - before).items():
    print(line.split("snippet.py:")[1], "*", n)
""")
    assert said.splitlines() == [f"{n} in <module> * 1" for n in (6, 7, 8, 9, 11)]


RANKS = """
import os, time
rank = 0 if os.fork() else 1
import torch, torch.distributed as dist
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=f"file://{__file__}.store", rank=rank, world_size=2)
def x(n=4, dtype=torch.float32):
    return torch.ones(n, device="cuda", dtype=dtype)
def attempt(*calls):
    begin = time.monotonic()
    try:
        calls[rank]()
    except Exception as error:
        print("ENDED", time.monotonic() - begin < 10, rank, error, flush=True)
y = x()
dist.all_reduce(y)
"""


@pytest.mark.parametrize(
    ("first", "second", "report"),
    [
        ("all_reduce(x(4))", "all_reduce(x(5))", "ncclAllReduce of 4 float32, reduction 0, but "
         "rank 1 calls ncclAllReduce of 5 float32, reduction 0"),
        ("all_reduce(x())", "all_reduce(x(4, torch.int32))", "calls ncclAllReduce of 4 int32"),
        ("all_reduce(x())", "broadcast(x(), 0)", "but rank 1 calls ncclBroadcast of 4 float32"),
        ("broadcast(x(), 0)", "broadcast(x(), 1)", "root 0, but rank 1 calls ncclBroadcast of"),
    ],
    ids=["size", "type", "kind", "root"],
)  # fmt: skip
def test_collectives_that_differ_are_an_error(simulated, first, second, report):
    body = f"attempt(lambda: dist.{first}, lambda: dist.{second})\ndist.all_reduce(y)\n"
    said = simulated(RANKS + body + "assert y[0] == 4\nrank or os.wait()\n", flags="--gpus 2")
    assert report in said
    assert "in <lambda> < " in said


def test_ranks_on_one_device_are_an_error(simulated):
    said = simulated(RANKS.replace("set_device(rank)", "set_device(0)"), flags="--gpus 2", status=1)
    assert "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 0" in said


def test_a_rank_that_dies_ends_the_others(simulated):
    body = "rank and os._exit(1)\nattempt(lambda: dist.all_reduce(y))\nos._exit(0)\n"
    said = simulated(RANKS + body, flags="--gpus 2")
    assert "ENDED True" in said
    assert (
        "rank 0 of 2 waits in ncclAllReduce of 4 float32, reduction 0, but rank 1 is gone" in said
    )
