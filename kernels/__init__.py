"""Fused Triton ops for the training step of a GPT, one folder for each op: `fastgpt.kernels`.

In each folder `op` has the public function, its checks and its plain PyTorch reference
(`<op>_ref`; of attention and the losses it is in `plain`), `device` the Triton kernels and what
launches them (of attention `forward` and `backward`). What is faster than the reference on a CPU is
in `cpu`, or in `op` where it is the whole op.

The kernels run on CUDA, and on CPU tensors in Triton's interpreter; anywhere else a plain form
does. A gradient of a gradient raises where they run.
"""

if __name__ == "kernels":  # imported in the repository's root: leads to fastgpt.kernels
    from fastgpt.kernels.alias import stand_in

    __getattr__ = stand_in(__path__)
else:
    from .attention.cpu import attention_blocked
    from .attention.dropout import attention_dropout_mask
    from .attention.op import attention, attention_packed
    from .attention.plain import attention_ref
    from .attention.sdpa import scaled_dot_product_attention
    from .bias_act.op import bias_act
    from .cross_entropy.linear import linear_cross_entropy
    from .cross_entropy.op import cross_entropy
    from .decode_attention.op import decode_attention
    from .dropout.op import dropout
    from .invariant import batch_invariant, is_batch_invariant
    from .linear.op import linear
    from .norm.op import add_layer_norm, add_rms_norm, layer_norm, rms_norm
    from .rotary.op import rotary, rotary_ref

    __all__ = [
        "add_layer_norm",
        "add_rms_norm",
        "attention",
        "attention_blocked",
        "attention_dropout_mask",
        "attention_packed",
        "attention_ref",
        "batch_invariant",
        "bias_act",
        "cross_entropy",
        "decode_attention",
        "dropout",
        "is_batch_invariant",
        "layer_norm",
        "linear",
        "linear_cross_entropy",
        "rms_norm",
        "rotary",
        "rotary_ref",
        "scaled_dot_product_attention",
    ]
