"""`python -m fastgpt.sample`, and the texts of evaluations: several prompts in one batch."""

import re
from collections.abc import Callable

import pytest
import torch

from fastgpt.checkpoint import checkpoint
from fastgpt.data.tokenizers import ByteTokenizer
from fastgpt.sample import main
from fastgpt.sampling.text import encode_prompt, sample_text
from tests.models import greedy, sharp

FLAGS = ("--device", "cpu", "--tokens", "9")


@pytest.fixture
def sample(trained, one_thread, capsys) -> Callable[..., str]:
    """Runs the command on a briefly trained model; returns what it prints."""

    def command(*flags: str) -> str:
        capsys.readouterr()
        main([str(trained), *FLAGS, *flags])
        return capsys.readouterr().out

    return command


def test_samples_of_each_prompt_stand_together_below_lines_that_tell_which(sample):
    flags = ("--prompt", "the", "--prompt", "cat", "--n", "3", "--temperature", "2")
    out = sample(*flags)
    _, *found = re.split(r"(?:^|\n)--- prompt (\d) of 2, sample (\d) of 3 ---\n", out)
    assert [*zip(found[::3], found[1::3])] == [(i, j) for i in "12" for j in "123"]
    assert [text[:3] for text in found[2::3]] == ["the"] * 3 + ["cat"] * 3
    assert len({*found[2::3]}) == 6
    assert sample(*flags) == out != sample(*flags, "--seed", "1")


def test_a_run_is_sampled_from_where_its_loss_was_lowest(fit, capsys):
    flags = "--optim.lr 3 --optim.kind adamw --optim.schedule constant --optim.grad-clip 0"
    run = fit(flags, "--steps 12 --eval-every 2 --model.dropout 0.2")
    best, last = run / "checkpoints" / "best", run / "checkpoints" / "step_00000012"
    step = checkpoint.load(best).step
    assert step < 12
    capsys.readouterr()
    texts = []
    for path in (run, best, last):
        main([str(path), *FLAGS])
        out, err = capsys.readouterr()
        texts.append(out)
        assert (f"sampling from {best}, step {step}, " in err) == (path == run)
    assert texts[0] == texts[1] != texts[2]


class WithEnd(ByteTokenizer):
    """A tokenizer of bytes below 30; one of them ends the text."""

    def __init__(self, eot_id: int | None, *more: int) -> None:
        super().__init__()
        self.vocab_size = 30
        self.eot_id, self.stop_ids = eot_id, frozenset(more)


def test_texts_end_before_the_end_of_text_token():
    model = sharp(num_heads=2, dim=16, vocab_size=30)
    prompts = [torch.tensor(row) for row in ([3, 1, 4, 1, 5], [9], [2, 6, 5])]
    options = {"max_new_tokens": 11, "temperature": 0, "seed": 0}
    full = [greedy(model, prompt, 11) for prompt in prompts]
    stops = sorted({token for row in full for token in row})
    for stop in (None, *stops[::3]):
        expected = []
        for row, prompt in zip(full, prompts, strict=True):
            end = [*row, stop].index(stop, len(prompt))  # a prompt keeps its own
            expected.append(bytes(row[:end]).decode())
        for ends in ((stop,), (None, stop)) if stop is not None else ((None,),):
            assert sample_text(model, WithEnd(*ends), prompts, **options) == expected


def test_an_empty_prompt_begins_a_document_where_there_are_any():
    assert encode_prompt("", WithEnd(7)).tolist() == [7]
