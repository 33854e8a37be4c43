"""fastgpt: a trainer for GPT-2-class language models on fused Triton kernels."""

__version__ = "0.1.0"
