"""Our kernels in models of Hugging Face: `patch(model)` and `unpatch(model)`."""

from fastgpt.hf.patching import Patched, patch, unpatch

__all__ = ["Patched", "patch", "unpatch"]
