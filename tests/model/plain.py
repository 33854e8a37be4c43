"""The network written a second time, in PyTorch's plainest operations, from its weights alone."""

import math

import torch
from torch import Tensor

from fastgpt.model.gpt import GPT


def plain_norm(x, w, name, config):
    if f"{name}.weight" not in w:  # as before the lecture's step F
        return x
    if config.norm.endswith("rmsnorm"):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"]
    y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    return y * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)


def plain_linear(x, w, name):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def plain_rotary(x, base):
    """Rotates pairs (i, i + D/2) as complex numbers by position * base ** (-2 i / D)."""
    T, half = x.shape[1], x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:])
    for t in range(T):
        for i in range(half):
            angle = torch.tensor(t * base ** (-i / half), dtype=torch.float64)
            turned[:, t, :, i] = turned[:, t, :, i] * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)


def plain_attention(x, w, name, config):
    """Computes attention by head and query; without a projection where a lecture step has none."""
    B, T, C = x.shape
    H, K = config.num_heads, config.num_kv_heads or config.num_heads
    D = C // H
    q, k, v = plain_linear(x, w, f"{name}.c_attn").split((H * D, K * D, K * D), -1)
    q, k, v = q.view(B, T, H, D), k.view(B, T, K, D), v.view(B, T, K, D)
    if config.qk_norm:
        q, k = (t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    if config.position == "rotary":
        q, k = plain_rotary(q, config.rotary_base), plain_rotary(k, config.rotary_base)
    out = torch.zeros_like(q)
    root = math.sqrt(D if config.architecture == "gpt" else C)
    for h in range(H):
        for t in range(T):
            seen = slice(0 if config.window is None else max(0, t + 1 - config.window), t + 1)
            kv = h // (H // K)
            scores = torch.einsum("bd,bjd->bj", q[:, t, h], k[:, seen, kv]) / root
            out[:, t, h] = torch.einsum("bj,bjd->bd", scores.softmax(-1), v[:, seen, kv])
    projected = f"{name}.c_proj.weight" in w
    return plain_linear(out.flatten(2), w, f"{name}.c_proj") if projected else out.flatten(2)


def plain_mlp(x, w, name, config):
    x = plain_linear(x, w, f"{name}.c_fc")
    match config.activation:
        case "gelu_tanh":
            y = 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())
        case "gelu_erf":
            y = 0.5 * x * (1 + (x / math.sqrt(2)).erf())
        case "relu":
            y = x.clamp(min=0)
        case "relu_squared":
            y = x.clamp(min=0) ** 2
        case "swiglu":
            gate, up = x.split(x.shape[-1] // 2, -1)
            y = gate * gate.sigmoid() * up
    return plain_linear(y, w, f"{name}.c_proj")


def plain_position(config, w, T):
    if config.position == "learned":
        return w["wpe.weight"][:T]
    if config.position != "sinusoidal":
        return 0
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float64) / config.dim
    angles = torch.arange(T)[:, None] / 10_000**exponents
    return torch.cat((angles.sin(), angles.cos()), -1)


def plain_block(x, w, block, config):
    def attend(x):
        return plain_attention(x, w, f"{block}.attn", config)

    def feed_forward(x):
        return plain_mlp(x, w, f"{block}.mlp", config)

    def norm(x, number):
        return plain_norm(x, w, f"{block}.ln_{number}", config)

    if config.architecture == "heads":
        return attend(x)
    if config.architecture == "feedforward":
        return plain_linear(attend(x), w, f"{block}.mlp.0").clamp(min=0)
    if config.norm.startswith("post"):
        x = norm(x + attend(x), 1)
        return norm(x + feed_forward(x), 2)
    x = x + attend(norm(x, 1))
    return x + feed_forward(norm(x, 2))


def plain_logits(model: GPT, tokens: Tensor) -> Tensor:
    """Computes the logits from the weights alone, in float64 and in the order of the papers."""
    config = model.config
    w = {name: weight.double() for name, weight in model.state_dict().items()}
    if config.architecture == "bigram":
        return w["wte.weight"][tokens]
    x = w["wte.weight"][tokens] + plain_position(config, w, tokens.shape[1])
    for i in range(config.num_layers):
        x = plain_block(x, w, f"h.{i}", config)
    if not config.norm.startswith("post"):
        x = plain_norm(x, w, "ln_f", config)
    logits = plain_linear(x, w, "wte" if config.tied else "lm_head")
    return logits if config.softcap is None else config.softcap * (logits / config.softcap).tanh()
