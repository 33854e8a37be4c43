"""A tiny random model as a run and as an export.

Fixtures import what they need: nothing may import triton before the tests are configured.
"""

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """Run and export of one GPT-2 with a BPE tokenizer; its context is 40."""
    from tests.convert.models import converted, saved_run
    from tests.data.sets import tokenizer_of

    place, tokenizer = tmp_path_factory.mktemp("model"), tokenizer_of("bpe")
    torch.manual_seed(1)
    run = saved_run(place / "run", tokenizer, vocab_size=tokenizer.vocab_size)
    return run, converted(run, place / "hf", "hf")
