"""Text that appears while it is generated: whole characters, stop strings, log-probabilities."""

import io

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

import fastgpt
from fastgpt.data import tokenizers as our_tokenizers
from fastgpt.data.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer
from fastgpt.sampling.chat import Template, talk
from fastgpt.sampling.streaming import GeneratedText
from fastgpt.sampling.text import sample_text
from tests.models import sharp

TEXTS = ["the cat sat on the mat; \u4e2d\u6587, caf\u00e9 \U0001f600 and don't. " * 3]


def spaced() -> Tokenizer:
    """A tokenizer as Llama 2's: spaces begin words, and other characters become bytes."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581the", "\u2581cat", "s"]
    known = {word: i for i, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(known, [], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return Tokenizer(made.to_str())


TOKENIZERS = {
    "bytes": ByteTokenizer(),
    "chars": CharTokenizer(TEXTS[0] + "\r\n\ufffd"),
    "ids": our_tokenizers.IdTokenizer(300),
    "bpe": our_tokenizers.train_bpe(lambda: TEXTS, 300),
    "wordpiece": our_tokenizers.train_wordpiece(lambda: TEXTS, 300),
    "spaced": spaced(),
}


def told(tokenizer, prompt, ids, **options):
    """Streams given ids; returns the pieces."""
    options |= {"max_new_tokens": len(ids), "temperature": 0}
    text, pieces = GeneratedText(tokenizer, torch.tensor(prompt), **options), []
    while not (pieces and pieces[-1].finish):
        pieces.append(text.add(torch.eye(400)[ids[len(pieces)]]))
    return pieces


PROMPTS = {"ids": [7, 12], "spaced": [257, 258]}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=30)
def test_pieces_make_up_the_text(kind, data):
    tokenizer = TOKENIZERS[kind]
    prompt = PROMPTS.get(kind) or tokenizer.encode("the cat").tolist()
    if kind == "spaced":  # its decoder lets a byte that is no text break those before it
        text = data.draw(st.text("th\u4e2d\U0001f600", min_size=1, max_size=8))
        words = {"t": [257], "h": [258]}
        ids = [id for c in text for id in words.get(c, [1 + byte for byte in c.encode()])]
    else:
        anything = st.integers(0, tokenizer.vocab_size - 1).filter(lambda i: i != tokenizer.eot_id)
        ids = data.draw(st.lists(anything, min_size=1, max_size=20))
    pieces = told(tokenizer, prompt, ids)
    before = len(tokenizer.decode(prompt))
    assert "".join(map(str, pieces)) == tokenizer.decode(prompt + ids)[before:]
    assert [token.id for piece in pieces for token in piece.tokens] == ids
    assert [piece.finish for piece in pieces] == [None] * (len(ids) - 1) + ["length"]


def test_half_a_character_is_not_shown():
    pieces = told(ByteTokenizer(), [65], [*"\u00e9\U0001f600".encode(), 0xF0, 0x9F, 66, 0xE2])
    shown = [piece.text for piece in pieces]
    assert shown == ["", "\u00e9", "", "", "", "\U0001f600", "", "", "\ufffdB", "\ufffd"]


@settings(max_examples=60)
@given(
    st.text("ab ", min_size=1, max_size=20),
    st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_stop_strings_end_the_text_before_any_part_of_them_is_shown(text, stop, strip):
    tokenizer = CharTokenizer("ab ")
    pieces = told(tokenizer, [0], tokenizer.encode(text).tolist(), stop=stop, strip=strip)
    text = text.lstrip() if strip else text
    grown = (text[:n] for n in range(len(text) + 1))
    text = next((part for part in grown if any(map(part.endswith, stop))), text)
    ends = [i for i in map(text.find, stop) if i >= 0]
    expected = text[: min(ends, default=None)]
    expected = expected.rstrip() if strip else expected
    seen = ""
    for piece in pieces:
        seen += piece.text
        assert expected.startswith(seen)
    assert seen == expected
    assert pieces[-1].finish == ("stop" if ends else "length")
    assert strip or sum(len(piece.tokens) for piece in pieces) == len(expected)


class Letters(CharTokenizer):
    """Thirty characters; one of them may end the text."""

    def __init__(self, eot_id=None):
        super().__init__(map(chr, range(65, 95)))
        self.eot_id = eot_id


@pytest.mark.parametrize("eot", [None, 0, 8, 16, 24])
@torch.no_grad()
def test_a_stream_is_the_sample_of_its_seed(eot):
    """Also beyond the context of 16 tokens; the log-probabilities are the model's own."""
    model = sharp(num_heads=2, dim=16, vocab_size=30)
    tokenizer, prompt = Letters(eot), torch.tensor([3, 1, 4])
    options = {"max_new_tokens": 25, "temperature": 0.9, "top_k": 9, "repetition_penalty": 1.2}
    [text] = sample_text(model, tokenizer, [prompt], seed=5, **options)
    generator = torch.Generator().manual_seed(5)
    pieces = [*fastgpt.stream(model, tokenizer, "DBE", logprobs=2, generator=generator, **options)]
    assert "DBE" + "".join(map(str, pieces)) == text
    row = [3, 1, 4]
    for token in (token for piece in pieces for token in piece.tokens):
        scores = model(torch.tensor([row[-16:]]))[0, -1].log_softmax(-1)
        assert token.logprob == pytest.approx(float(scores[token.id]), abs=1e-4)
        assert [id for id, _ in token.top] == scores.topk(2).indices.tolist()
        assert token.offset == len(row) - 3
        row.append(token.id)
    [cut] = sample_text(model, tokenizer, [prompt], seed=5, stop=text[8:10], **options)
    assert cut == text[: text.index(text[8:10], 3)] if text[8:10] else text


def test_a_stream_is_not_computed_ahead_and_leaves_nothing_switched_on():
    model = sharp(num_heads=2, dim=16, vocab_size=30)
    next(fastgpt.stream(model, Letters(), "DBE", max_new_tokens=10**5, exact=True))
    assert torch.is_grad_enabled()
    assert not fastgpt.kernels.is_batch_invariant()


def test_ctrl_c_and_a_line_that_is_too_long_do_not_end_a_conversation(monkeypatch, capsys):
    model = sharp(num_heads=2, dim=16, vocab_size=256, context=200)
    calls, forward = [], model.forward

    def interrupted(*args, **options):
        calls.append(args[0].shape[1])
        if len(calls) == 4:
            raise KeyboardInterrupt
        return forward(*args, **options)

    monkeypatch.setattr(model, "forward", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nyou\n" + "a" * 300))
    talk(model, ByteTokenizer(), Template(), max_new_tokens=5, temperature=0)
    assert len(calls) == 4 + 5
    assert calls[4] > calls[0], "the next turn has the first one before it"
    out, err = capsys.readouterr()
    assert out.count("\n") >= 2
    assert "more than the context of 200" in err
