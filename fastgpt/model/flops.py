"""FLOPs of a model's training step, for the MFU."""

from fastgpt.config.model import ModelConfig

MFU_CONVENTION = "6N + causal attention over the measured matmul peak"


def flops_per_token(config: ModelConfig) -> float:
    """Computes the FLOPs of forward and backward per token: 6 N + 12 L H D * (mean keys per query).

    N counts the weights of matrix products, with the padded output head: no embeddings of their
    own, positions, norms and biases. A causal query attends to (T + 1) / 2 keys on average, fewer
    with a window.
    """
    if config.architecture == "bigram":
        return 0.0  # one row is looked up
    C, D, F = config.dim, config.head_dim, config.ffn_width
    H, K, T = config.num_heads, config.kv_heads, config.context
    up = 2 * F if config.activation == "swiglu" else F
    after = {"heads": 0, "feedforward": C * C}.get(config.architecture, H * D * C + C * up + F * C)
    layer = C * (H + 2 * K) * D + after
    window = min(config.window or T, T)
    keys = (window * T - window * (window - 1) / 2) / T
    products = 6 * (config.num_layers * layer + config.padded_vocab * C)
    return products + 12 * config.num_layers * H * D * keys
