"""Counts of a model's arithmetic: its matrix weights, and the FLOPs of a token."""

from fastgpt.config.model import ModelConfig

MFU_CONVENTION = "6N + causal attention over the measured matmul peak"


def matrix_weights(config: ModelConfig) -> int:
    """Counts the weights of matrix products, with the padded output head.

    Embeddings of their own, positions, norms and biases do not count.
    """
    C, D, F = config.dim, config.head_dim, config.ffn_width
    H, K = config.num_heads, config.kv_heads
    up = 2 * F if config.activation == "swiglu" else F
    qkv, rest = C * (H + 2 * K) * D, H * D * C + C * up + F * C
    match config.architecture:
        case "bigram":
            return 0  # one row is looked up
        case "heads":
            rest = 0
        case "feedforward":
            rest = C * C
    return config.num_layers * (qkv + rest) + config.padded_vocab * C


def flops_per_token(config: ModelConfig) -> float:
    """Computes the FLOPs of forward and backward per token: 6 N + 12 L H D * (mean keys per query).

    N is `matrix_weights`. A causal query attends to (T + 1) / 2 keys on average, fewer with a
    window.
    """
    if config.architecture == "bigram":
        return 0.0
    T, width = config.context, config.num_heads * config.head_dim
    window = min(config.window or T, T)
    keys = (window * T - window * (window - 1) / 2) / T
    return 6 * matrix_weights(config) + 12 * config.num_layers * width * keys
