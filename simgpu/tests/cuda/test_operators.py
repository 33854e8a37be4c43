"""Operators of PyTorch give the same results as on the CPU."""

CASES = """
import torch
import torch.nn.functional as F
torch.manual_seed(0)

def twice(f, *args):
    "Results and gradients of f on the CPU and on CUDA."
    found = []
    for device in ("cpu", "cuda"):
        mine = [a.to(device, copy=True) for a in args]
        mine = [a.requires_grad_() if a.is_floating_point() else a for a in mine]
        out = f(*mine)
        out.float().square().sum().backward()
        found.append([out, *(a.grad for a in mine if a.requires_grad)])
    for cpu, cuda in zip(*found):
        assert cuda.is_cuda and cuda.dtype == cpu.dtype, (cuda.device, cuda.dtype)
        torch.testing.assert_close(cuda.cpu(), cpu, rtol=1e-5, atol=1e-5)

r = torch.randn
"""


def test_results_and_gradients_are_the_cpus(simulated):
    simulated(f"""{CASES}
twice(torch.mm, r(5, 6), r(6, 7))
twice(lambda x: x.t().contiguous()[1:, ::2] + 1, r(5, 6))
twice(lambda x, i: x[i].cumsum(0), r(5, 6), torch.tensor([3, 3, 0]))
twice(F.embedding, torch.tensor([1, 2, 1]), r(4, 8))
twice(lambda x: F.layer_norm(x, (8,)), r(3, 8))
twice(lambda x: F.rms_norm(x, (8,)), r(3, 8))
twice(lambda x: F.softmax(x, -1).log(), r(3, 8))
twice(F.cross_entropy, r(6, 9), torch.tensor([1, 2, 3, 4, 5, -100]))
twice(lambda x, y: torch.cat([x, y]).view(-1).sort().values, r(3, 2), r(2, 2))
twice(lambda x: torch.where(x > 0, x, x * 0.1), r(9))
for causal in (False, True):
    attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    twice(attend, *(r(2, 3, 16, 8) for _ in range(3)))
x = torch.arange(6, device="cuda")
assert x.nonzero().shape == (5, 1) and x.unique().numel() == 6
assert torch.empty(0, device="cuda").sum().item() == 0
""")


def test_each_kernel_of_attention_agrees(simulated):
    simulated(f"""{CASES}
from torch.nn.attention import SDPBackend, sdpa_kernel
q, k, v = (r(2, 3, 16, 8).bfloat16() for _ in range(3))
attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
backends = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION
for backend in backends:
    with sdpa_kernel([backend]):
        mine = [x.cuda().requires_grad_() for x in (q, k, v)]
        out = attend(*mine)
        out.sum().backward()
    torch.testing.assert_close(out.cpu(), attend(q, k, v), rtol=2e-2, atol=2e-2)
    assert out.transpose(1, 2).is_contiguous()
""")


def test_dropout_of_attention_has_one_mask_forward_and_backward(simulated):
    """With values of 1 per key the output shows the mask, with which autograd then agrees."""
    simulated("""
import torch, torch.nn.functional as F
q, k = (torch.randn(2, 3, 8, 16, device="cuda").requires_grad_() for _ in range(2))
v = torch.eye(8, 16, device="cuda").expand(2, 3, 8, 16).clone().requires_grad_()
upstream = torch.randn(2, 3, 8, 16, device="cuda")
for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
        half = [x.to(torch.bfloat16) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*half, is_causal=True, dropout_p=0.25).float()
    kept = out[..., :8] != 0
    assert 0.55 < kept.float().sum() / (2 * 3 * 36) < 0.95
    scores = (q @ k.mT / 4).masked_fill(torch.ones(8, 8, device="cuda").triu(1).bool(), -torch.inf)
    want = (scores.softmax(-1) * kept / 0.75) @ v
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
    for x in (q, k, v):
        got, true = (torch.autograd.grad(y, x, upstream, retain_graph=True)[0] for y in (out, want))
        assert (got - true).norm() < 0.03 * true.norm()
""")


def test_16_bits(simulated):
    simulated(f"""{CASES}
for half in (torch.float16, torch.bfloat16):
    x = r(4, 8).cuda().requires_grad_()
    with torch.autocast("cuda", half):
        probabilities = F.softmax(x @ x.t(), -1)
        assert probabilities.dtype == torch.float32
        F.cross_entropy(x @ x.t(), torch.arange(4).cuda()).backward()
    assert x.grad.dtype == torch.float32
    a, b = r(3, 4).cuda().to(half), r(4, 5).cuda().to(half)
    wide = torch.mm(a, b, out_dtype=torch.float32)
    torch.testing.assert_close(wide, a.float() @ b.float())
    sum = torch.addmm(wide, a, b, out_dtype=torch.float32)
    torch.testing.assert_close(sum, 2 * wide)
    x, w = (r(*size).cuda().to(half).requires_grad_() for size in ((64, 8), (8,)))
    norms = torch.native_layer_norm(x, (8,), w, None, 1e-5)
    wide = torch.native_layer_norm(x.float(), (8,), w.float(), None, 1e-5)
    assert [y.dtype for y in norms] == [half, torch.float32, torch.float32]
    for y, z in zip(norms, wide):
        torch.testing.assert_close(y, z.to(y.dtype))
    upstream = r(64, 8).cuda().to(half)
    got = torch.autograd.grad(norms[0], (x, w), upstream)
    torch.testing.assert_close(got, torch.autograd.grad(wide[0], (x, w), upstream.float()))
""")


def test_random_numbers_come_from_the_cuda_generator(simulated):
    simulated("""
import torch
def draw(seed):
    torch.cuda.manual_seed(seed)
    ones = torch.ones(1000, device="cuda")
    return torch.rand(4, device="cuda"), torch.nn.functional.dropout(ones, 0.25)
before = torch.get_rng_state()
first, again, other = draw(1), draw(1), draw(2)
assert all(torch.equal(x, y) for x, y in zip(first, again))
assert not any(torch.equal(x, y) for x, y in zip(first, other))
assert abs(first[1].mean().item() - 1) < 0.1
assert torch.equal(before, torch.get_rng_state())  # the CPU's is left alone
state = torch.cuda.get_rng_state()
a = torch.rand(4, device="cuda")
torch.cuda.set_rng_state(state)
assert torch.equal(a, torch.rand(4, device="cuda"))
""")


def test_what_cuda_lacks_and_the_cpu_has_is_an_error(simulated):
    simulated("""
import torch
x, p = torch.ones(3, 3, device="cuda", dtype=torch.int64), torch.ones(3, device="cuda")
for refused, call in (
    ("not implemented for 'Long'", lambda: x @ x),
    ("Expected a 'cuda' device type", lambda: p.multinomial(1, generator=torch.Generator())),
):
    try:
        call()
    except RuntimeError as error:
        assert refused in str(error), error
    else:
        raise AssertionError(refused)
""")
