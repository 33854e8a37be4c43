"""Supervised fine-tuning on conversations, and talking with the model that it gives."""

import io
import json

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by

import fastgpt
from fastgpt import sample
from fastgpt.cli import parse
from fastgpt.convert.source import read
from fastgpt.data.tokenizers.huggingface import JsonTokenizer
from fastgpt.errors import UserError
from fastgpt.sampling.chat import CHATML, Rows, Template, encode, open_conversations, template_of
from fastgpt.train.engine import Engine
from tests.runs import outcome

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "who"},
    {"role": "assistant", "content": "me"},
]
INST = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} [/INST]"
    "{% elif m['role'] == 'system' %}{{ raise_exception('no system') }}{% else %}"
    "{% generation %} {{ m['content'] }}</s>{% endgeneration %}{% endif %}{% endfor %}"
)
MARKED = CHATML.replace(
    "{{ message.content }}<|im_end|>\n",
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>\n"
    "{% endgeneration %}{% else %}{{ message.content }}<|im_end|>\n{% endif %}",
)
FLAGS = (
    "--data.align conversation --model.num-layers 2 --model.context 144 --train.batch-tokens 288"
    " --optim.kind adamw --optim.lr 1e-2 --optim.schedule constant --steps 4 --eval-every 0"
)


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, and special tokens of their own for ChatML and the end of a text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(models.BPE(letters, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return JsonTokenizer(made.to_str())


@pytest.fixture
def chats(tmp_path):
    """Writes conversations as JSONL; returns the flag that names the file."""

    def write(*rows, text=None):
        path = tmp_path / "chats.jsonl"
        path.write_text(text or "".join(json.dumps(row) + "\n" for row in rows))
        return f"--data.source {path}"

    return write


@pytest.mark.parametrize("text", [MARKED, INST], ids=["chatml", "inst"])
def test_text_and_mask_are_those_of_transformers(text, tokenizer):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer)
    template = Template(text)
    assert template.render(TALK) == theirs.apply_chat_template(
        TALK, chat_template=text, tokenize=False
    )
    asked = theirs.apply_chat_template(
        TALK[:3], chat_template=text, tokenize=False, add_generation_prompt=True
    )
    assert template.render(TALK[:3], answering=True) == asked
    tokenizer._tokenizer.encode_special_tokens = False  # they share it
    expected = theirs.apply_chat_template(
        TALK, chat_template=text, return_dict=True, return_assistant_tokens_mask=True
    )
    tokenizer._tokenizer.encode_special_tokens = True
    ids, learnt = encode(tokenizer, template.pieces(TALK))
    assert ids[1:].tolist() == expected["input_ids"]
    assert learnt[1:].tolist() == [bool(x) for x in expected["assistant_masks"]]


def test_the_loss_is_that_of_the_answers(tiny, chats):
    rows = [{"messages": TALK[:2]}, {"prompt": "why", "completion": "because"}, {"messages": TALK}]
    engine = Engine(parse(tiny(FLAGS, chats(*rows))))
    x, y = engine.loader.next()
    logits = engine.model(x)[..., :256]
    losses = []
    for row in rows[:2]:
        messages = row.get("messages") or [
            {"role": "user", "content": "why"},
            {"role": "assistant", "content": "because"},
        ]
        text = Template().render(messages).encode()
        begin = text.index(b"assistant\n") + len(b"assistant\n")
        [mine] = [i for i in range(2) if bytes(x[i, : len(text) - 1].tolist()) == text[:-1]]
        answer = torch.tensor(list(text[begin:]))
        placed = logits[mine, begin - 1 : len(text) - 1]
        losses.extend(F.cross_entropy(placed, answer, reduction="none"))
    engine.loader.close()
    assert len(losses) == (y >= 0).sum()
    assert engine.loss(x, y).item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)


def test_a_conversation_is_learnt_by_heart(fit, chats, monkeypatch, capsys):
    run = fit(FLAGS, chats(*[{"messages": TALK}] * 3), "--steps 60 --train.micro-batch 2")
    assert template_of(read(str(run)).hf_sidecars).text == CHATML
    assert f"fastgpt.sample {run} --chat\n" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n\nwho\n"))
    sample.main([str(run), "--chat", "--temperature", "0"])
    assert capsys.readouterr().out == "hello\nme\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nwho\nhi\n" * 4))
    sample.main([str(run), "--chat", "--tokens", "1"])
    assert capsys.readouterr().out.count("\n") == 12, "the oldest turns make room"


def test_packed_and_padded_rows_have_the_same_losses(tokenizer):
    conversations = [encode(tokenizer, Template().pieces(TALK[:n])) for n in (2, 4, 2)]
    packed, padded = (
        Rows(conversations, 200, tokenizer.eot_id, packed) for packed in (True, False)
    )
    assert (len(packed), len(padded)) == (1, 3)
    model = fastgpt.GPT.from_config(
        num_layers=2, num_heads=2, dim=32, context=200, vocab_size=tokenizer.vocab_size,
        position="rotary", document_mask=True, eot_id=tokenizer.eot_id,
    ).eval()  # fmt: skip

    def losses(rows):
        for x, y in (rows[i] for i in range(len(rows))):
            every = F.cross_entropy(
                model(x[None])[0, :, : tokenizer.vocab_size], y, reduction="none"
            )
            yield from every[y >= 0].tolist()

    assert list(losses(packed)) == pytest.approx(list(losses(padded)), rel=1e-5)


def test_a_run_on_conversations_goes_on(fit, chats, tmp_path):
    source = chats(*({"prompt": f"{i}?", "completion": f"{i * i}."} for i in range(12)))
    (tmp_path / "inst.jinja").write_text(INST)
    flags = [FLAGS, source, "--save-every 2", f"--data.chat-template {tmp_path / 'inst.jinja'}"]
    whole = outcome(fit(*flags, f"--run-dir {tmp_path / 'whole'}"))
    fit(*flags, "--steps 2")
    (tmp_path / "inst.jinja").unlink()
    run = fit(*flags, "--resume auto")
    assert outcome(run)[1] == whole[1]
    assert template_of(read(str(run)).hf_sidecars).text == INST


def row(*messages):
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


BAD = {
    "two users": (row(("user", "a"), ("user", "b")), r"message 2 is .*: expected a role .assist"),
    "empty answer": (row(("user", "a"), ("assistant", " ")), r"message 2 is .*answer is not empt"),
    "unknown role": (row(("human", "a")), r"message 1 is .*: expected a role .system, user"),
    "no answer": (row(("user", "a")), r"the last message is not the assistant's: expected an answ"),
    "nothing": ({"text": "a"}, r"expected an object with `messages`, or with `prompt` and `compl"),
    "no text": ({"prompt": 3, "completion": "b"}, r"message 1 is .*: expected a role .* and a con"),
    "too long": ({"prompt": "a" * 130, "completion": "b"}, r"has 1\d\d tokens: expected at most"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_conversations_are_named(kind, tiny, chats):
    bad, said = BAD[kind]
    source = chats({"messages": TALK}, bad)
    with pytest.raises(UserError, match=rf"chats.jsonl, line 2: (the conversation )?{said}"):
        Engine(parse(tiny(FLAGS, source)))


def test_bad_files_and_templates_are_named(tiny, chats, tokenizer, tmp_path):
    def refused(source, said, *flags):
        with pytest.raises(UserError, match=said):
            Engine(parse(tiny(FLAGS, source, *flags)))

    refused(chats(text="{"), r"chats.jsonl, line 1: not JSON \(")
    refused(chats({"messages": TALK}), r"has 1 conversations: expected two or more")
    refused("--data.source missing.jsonl", r"^missing.jsonl cannot be read: No such file")
    good, file = chats({"messages": TALK}, {"messages": TALK}), tmp_path / "x.jinja"
    refused(good, r"x.jinja cannot be read: No such file", f"--data.chat-template {file}")
    for text, said in (
        ("{% if %}", r"^the chat template cannot be read: "),
        ("{{ raise_exception('no') }}", r"line 1: the chat template refuses the messages: no"),
        ("{{ messages[-1].content }}", r"line 1: the chat template changes earlier turns when"),
    ):
        file.write_text(text)
        refused(good, said, f"--data.chat-template {file}")
    path = tmp_path / "chats.jsonl"
    chats({"prompt": "<|im_end|>", "completion": "a"})
    options = {"context": 128, "packed": False, "val_fraction": 0.1}
    with pytest.raises(UserError, match=r"line 1: a message contains <\|im_end\|>, a special tok"):
        open_conversations(path, tokenizer, Template(), **options)


def test_a_model_without_template_cannot_chat(fit):
    run = fit("--steps 1")
    with pytest.raises(UserError, match=r"has no chat template: expected a model that can chat"):
        sample.main([str(run), "--chat"])
