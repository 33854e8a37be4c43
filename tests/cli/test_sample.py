"""`python -m fastgpt.sample`, and the texts of evaluations: several prompts in one batch."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastgpt.checkpoint import checkpoint
from fastgpt.convert.source import load
from fastgpt.data.tokenizers import ByteTokenizer
from fastgpt.device.device import DTYPES
from fastgpt.errors import UserError, shown_in_one_line
from fastgpt.ops import torch_ops
from fastgpt.sample import main, separated
from fastgpt.sampling.text import encode_prompt, sample_text
from tests.models import greedy, sharp
from tests.runs import one_line_error

RULE = re.compile(r"\n?--- prompt \d of 2, sample \d of 3 ---\n")
FLAGS = ("--device", "cpu", "--tokens", "9")


@pytest.fixture
def sample(fit: Callable[..., Path], capsys) -> Callable[..., list[str]]:
    """Runs the command on a briefly trained model; returns its texts."""
    run = fit("--steps 8 --data.tokenizer chars --train.sample-tokens 0")
    capsys.readouterr()

    def command(*flags: str) -> list[str]:
        main([str(run), *FLAGS, *flags])
        return [text for text in RULE.split(capsys.readouterr().out[:-1]) if text]

    return command


def test_samples_of_each_prompt_stand_together(sample):
    flags = ("--prompt", "the", "--prompt", "cat", "--n", "3", "--temperature", "2")
    texts = sample(*flags)
    assert [text[:3] for text in texts] == ["the"] * 3 + ["cat"] * 3
    assert len(set(texts)) == 6
    assert sample(*flags) == texts
    assert sample(*flags, "--seed", "1") != texts


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


def test_a_prompt_whose_beginning_the_model_does_not_see_is_told(fit, tmp_path, capsys):
    said = "has 17 tokens: the model sees the last 16, its context"
    fit(f"--steps 1 --run-dir {tmp_path / 'other'}")
    capsys.readouterr()
    main([str(tmp_path / "other"), *FLAGS, "--prompt", "t" * 16, "--prompt", "t" * 17])
    assert capsys.readouterr().err.splitlines()[0] == f"warning: --prompt {said}"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_have_the_precision_asked_for(sample, precision, monkeypatch):
    dtypes, logits = set(), torch_ops.head_logits

    def seen(*args, **options):
        y = logits(*args, **options)
        dtypes.add(y.dtype)
        return y

    monkeypatch.setattr("fastgpt.model.gpt.head_logits", seen)
    sample("--prompt", "the", "--precision", precision)
    assert dtypes == {DTYPES[precision]}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prompt", "the", "--prompt", "the€"), "--prompt is 'the€': character '€' (U+20AC)"),
        (("--prompt", "the", "--prompt", ""), "--prompt is empty: expected some text"),
        (("--prompt", "the", "--kernels", "triton"), None),
        (
            ("--max-tokens", "9"),
            "unknown flag '--max-tokens'; did you mean '--tokens'?",
        ),
        (("--precision", "fp16"), "--precision is fp16, which needs CUDA: expected fp32 or bf16"),
        (("--top-k", "0"), "--top-k is 0: expected 1 or more"),
        (("--tokens", "1" + 11 * "0"), "--tokens is 100000000000: expected at most 268,435,456"),
        (("--tokens", "1", "--n", str(2**28 + 1)), "--n is 268435457, --tokens is 1: expected"),
        (("--temperature", "1e-45"), "--temperature is 1e-45: expected 0, or a number from 1e-6"),
    ],
)
def test_bad_flags_are_one_line(sample, capsys, flags, message, monkeypatch):
    if message is None:
        monkeypatch.setattr("fastgpt.kernels.runtime.INTERPRETING", False)
        message = "--kernels is triton: it runs on CUDA, not on cpu"
    assert message in one_line_error(capsys, shown_in_one_line()(sample), *flags)


class WithEnd(ByteTokenizer):
    """A tokenizer of bytes below 30, of which one ends the text."""

    def __init__(self, eot_id: int | None, *more: int) -> None:
        super().__init__()
        self.vocab_size = 30
        self.eot_id, self.stop_ids = eot_id, frozenset(more)


def test_texts_end_before_the_end_of_text_token():
    model = sharp(num_heads=2, dim=16, vocab_size=30)
    prompts = [torch.tensor(row) for row in ([3, 1, 4, 1, 5], [9], [2, 6, 5])]
    options = {"max_new_tokens": 11, "temperature": 0, "seed": 0}
    full = [greedy(model, prompt, 11) for prompt in prompts]
    for stop in (None, *sorted({token for row in full for token in row})):
        expected = []
        for row, prompt in zip(full, prompts, strict=True):
            end = [*row, stop].index(stop, len(prompt))  # a prompt keeps its own
            expected.append(bytes(row[:end]).decode())
        for ends in ((stop,), (None, stop)) if stop is not None else ((None,),):
            assert sample_text(model, WithEnd(*ends), prompts, **options) == expected


def test_a_device_that_is_not_there_is_named_by_its_own_flag(sample, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=r"^--device is cuda, .* or pass --device cpu$"):
        sample("--device", "cuda")


def test_the_coldest_draws_are_the_likeliest_tokens(sample):
    cold = sample("--prompt", "t", "--temperature", "1e-6")
    assert cold == sample("--prompt", "t", "--temperature", "0")


def test_several_samples_stand_below_a_line_that_tells_which():
    assert separated(["a"], 1) == "a"
    said = "--- prompt 1 of 2, sample 1 of 1 ---\na\n--- prompt 2 of 2, sample 1 of 1 ---\nb"
    assert separated(["a", "b"], 1) == said


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(UserError, match=r" is not a model: expected a run or checkpoint, a folder"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"/no does not exist: expected a run such as runs/NAME"):
        load(tmp_path / "no")


def test_an_empty_prompt_begins_a_document_where_there_are_any():
    assert encode_prompt("", WithEnd(7)).tolist() == [7]
