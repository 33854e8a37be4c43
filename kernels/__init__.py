"""Fused ops of a GPT's training step, one op a file, each with its plain PyTorch reference."""
