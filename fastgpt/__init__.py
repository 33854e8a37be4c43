"""fastgpt: a small, fast trainer for GPT-2-class language models."""

__version__ = "0.1.0"
