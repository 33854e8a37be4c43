"""A trace tells the bytes, products and thread of each piece of work."""

TEXT = """
import threading, torch, simgpu, triton, triton.language as tl

@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)

x, y, z = torch.ones(3, 1000, device="cuda")
table = torch.ones(500, 8, device="cuda")
half = torch.ones(8, 4, device="cuda", dtype=torch.bfloat16)
weight = torch.ones(4, 6, device="cuda", requires_grad=True)
packed = torch.ones(1, 400, 3, 2, 8, device="cuda", requires_grad=True)
q, k, v = (x.squeeze(2).transpose(1, 2) for x in packed.split(1, 2))
total = torch.ones(8, 8, device="cuda")
gradient = [torch.ones(10, device="cuda")]
moments = [[torch.ones(10, device="cuda")] for _ in range(3)]
counted, scale = [torch.ones((), device="cuda")], torch.ones((), device="cuda")
settings = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.1, "eps": 1e-8}
settings |= {"amsgrad": False, "maximize": False}
scores = torch.zeros(20, 30, device="cuda")
targets = torch.zeros(20, device="cuda", dtype=torch.int64)
x.cpu()
with simgpu.trace() as works:
    add[(8,)](x, y, z, 900, BLOCK=128)
    x.add_(y)
    torch.add(x, y.expand(3, 1000)[0, :1].expand(1000), out=z)
    x.zero_()
    torch.nn.functional.embedding(torch.tensor([3, 4], device="cuda"), table)
    torch.mm(half, half.T, out_dtype=torch.float32)
    torch.addmm(total, half, half.T, beta=0, out_dtype=torch.float32, out=total)
    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.nn.functional.nll_loss(scores, targets)
    for of in (None, scale):
        first, *more = moments
        torch._fused_adamw_(first, gradient, *more, [], counted, grad_scale=of, **settings)
    (table[:2, :4] @ weight).backward(torch.ones(2, 6, device="cuda"))
for it in works:
    print(it.name, *map(int, it[3:]), it.thread == threading.get_native_id(), sep="; ")
"""
TENSOR, HEADS = 4 * 1000, 4 * 2 * 400 * 8


def test_work_has_its_bytes_once_and_its_products(simulated):
    said = [line.split("; ") for line in simulated(TEXT).splitlines()]
    expected = [
        ("add", 2 * 4 * 900, 4 * 900, 0),
        ("aten::add_", 2 * TENSOR, TENSOR, 0),  # in place
        ("aten::add", TENSOR + 4, TENSOR, 0),  # one number, repeated
        ("aten::zero_", 0, TENSOR, 0),
        ("copy to the device", 16, 16, 0),
        ("aten::index_select", 16 + 64, 64, 0),  # two rows of a large table
        ("aten::mm", 2 * 64, 4 * 64, 8 * 4 * 8),
        ("aten::addmm", 2 * 64, 4 * 64, 8 * 4 * 8),  # adds nothing
        ("attention", 3 * HEADS, HEADS + 4 * 2 * 400, 0),  # one launch, with the log-sum-exp
        ("aten::nll_loss_forward", 20 * (4 + 8), 8, 0),
        ("aten::_fused_adamw_", 4 * 41, 4 * 30, 0),
        ("aten::_fused_adamw_", 4 * 42, 4 * 40, 0),  # scales the gradients
        ("aten::mm", 4 * (8 + 24), 4 * 12, 2 * 4 * 6),
        ("aten::fill_", 0, 4 * 12, 0),
        ("aten::mm", 4 * (8 + 12), 4 * 24, 4 * 2 * 6),
    ]
    assert [(name, *map(int, rest)) for name, *rest, _ in said] == expected
    assert [main for *_, main in said] == ["True"] * 14 + ["False"]  # the backward's thread
