"""CUDA graphs, which are captured and launched."""

CAPTURE = """
import torch
import torch.nn.functional as F

def capture(step):
    "A graph of step, and the tensors that it writes."
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, step()
"""


def test_a_graph_computes_anew_from_what_its_inputs_hold(simulated):
    simulated(f"""{CAPTURE}
import triton, triton.language as tl

@triton.jit
def twice(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at))

x, w = torch.randn(4, 8, device="cuda"), torch.randn(8, 8, device="cuda", requires_grad=True)
total, host = torch.zeros(8, device="cuda"), torch.zeros(32).pin_memory()
labels, source = torch.tensor([1, 2, 3, 0], device="cuda"), torch.ones(1).pin_memory()
q, k, v = (torch.randn(2, 3, 16, 8, device="cuda").bfloat16().requires_grad_() for _ in "qkv")

def step():
    y = F.dropout(x @ w, 0.5)
    gradient, = torch.autograd.grad(y.square().sum(), w)
    out = torch.empty(32, device="cuda")
    twice[(1,)](y, out, BLOCK=32)
    host.copy_(out, non_blocking=True)
    total.add_(x.sum(0))
    given = source.to("cuda", non_blocking=True)
    loss = F.cross_entropy(y, labels, label_smoothing=0.1) / 2
    return y, gradient, out, x.half(), loss * 0.5 + given

def attend():
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y, *torch.autograd.grad(y.float().square().sum(), (q, k, v))

graph, (y, gradient, out, half, loss) = capture(step)
assert y.isnan().all() and not total.any()  # a capture does nothing
torch.cuda.synchronize()
before = host.clone()
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    step()
torch.cuda.synchronize()
assert torch.equal(host, before)
attention, results = capture(attend)
masks = []
for _ in range(2):
    with torch.no_grad():
        x.copy_(torch.randn(4, 8))
        q.normal_()
    before = total.clone()
    source += 1
    graph.replay()
    masks.append(y != 0)
    want = (x @ w) * masks[-1] * 2
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(gradient, torch.autograd.grad(want.square().sum(), w)[0])
    torch.testing.assert_close(total, before + x.sum(0))
    torch.cuda.synchronize()
    smooth = F.cross_entropy(y, labels, label_smoothing=0.1)
    torch.testing.assert_close(loss, smooth / 4 + source.cuda())
    assert torch.equal(out, 2 * y.flatten()) and torch.equal(out.cpu(), host)
    assert torch.equal(half, x.half())
    attention.replay()
    assert all(map(torch.equal, results, attend()))
assert not torch.equal(*masks)

other, beside = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
graph = torch.cuda.CUDAGraph(keep_graph=True)
other.wait_stream(torch.cuda.current_stream())
with torch.cuda.graph(graph, capture_error_mode="relaxed"):
    doubled = 2 * x
    with torch.cuda.stream(other):
        beside.fill_(3)
        assert beside.cpu().sum() == 3000
for _ in range(2):
    graph.instantiate()
    graph.replay()
assert torch.equal(doubled, 2 * x) and (beside == 3).all()
""")


def test_what_a_capture_forbids_is_an_error(simulated):
    said = simulated(
        CAPTURE
        + """
def attempt(name, step):
    try:
        step()
    except RuntimeError as error:
        print(name, "REFUSED", str(error).splitlines()[0])

def forked():
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()

x, side = torch.ones(1000, device="cuda"), torch.cuda.Stream()
before = side.record_event()
attempt("fine", lambda: capture(lambda: x + 1))
for name, step in {
    "number": lambda: x.sum().item(),
    "mask": lambda: x[x > 0],
    "device": torch.cuda.synchronize,
    "stream": lambda: before.wait() if torch.cuda.is_current_stream_capturing() else 0,
    "fork": lambda: forked() if torch.cuda.is_current_stream_capturing() else 0,
}.items():
    attempt(name, lambda: capture(step))
graph, y = capture(lambda: x + 1)
graph.replay()
assert y[0].item() == 2
y = torch.zeros(1000, device="cuda")
graph.replay()
del x
attempt("freed", graph.replay)
"""
    )
    lines = said.splitlines()
    refused = [line.split()[0] for line in lines if " REFUSED " in line]
    assert refused == ["number", "mask", "device", "stream", "fork", "freed"]
    for reason in (
        "the host waits for the device while the stream is captured",
        "a captured stream waits for an event from outside of its capture",
        "does not wait for the work of another that is captured with it",
        "a graph uses memory at",
    ):
        assert any(reason in line for line in lines)


def test_graphs_of_torch_compile_train_as_eager_steps(simulated):
    """Graphs of `reduce-overhead` share a pool; in the end a step is two launches."""
    simulated("""
import copy, simgpu, torch, torch.nn.functional as F
from simgpu.launches import launched
plain = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32)).cuda()
net = copy.deepcopy(plain)
compiled = torch.compile(net, mode="reduce-overhead")
for step in range(4):
    x, target = torch.randn(8, 16, device="cuda"), torch.randint(32, (8,), device="cuda")
    losses = []
    for model, weights in ((plain, plain), (compiled, net)):
        before, kernels = simgpu.counts(), launched.total()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        found, kernels = simgpu.counts() - before, launched.total() - kernels
        with torch.no_grad():
            for p in weights.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) < 1e-5, losses
assert found["cudaGraphLaunch"] == 2 and found["cudaMalloc"] == 0 and kernels == 0
""")


def test_collectives_of_a_graph_are_made_with_each_launch(simulated):
    text = """
import os
rank = 0 if os.fork() else 1
import torch, torch.distributed as dist
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=f"file://{__file__}.store", rank=rank, world_size=2)
x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
dist.all_reduce(x)
with torch.cuda.graph(graph):
    y = x * (rank + 1)
    dist.all_reduce(y)
for value in (5, 7):
    x.fill_(value)
    graph.replay()
    assert y[0].item() == 3 * value
dist.destroy_process_group()
assert rank or os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""
    simulated(text, flags="--gpus 2")
