"""Supervised fine-tuning on conversations, and talking with the model that it gives."""

import io
import json

import pytest
import tokenizers
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import fastgpt
from fastgpt import sample
from fastgpt.convert.source import read
from fastgpt.data.tokenizers import ByteTokenizer, Tokenizer
from fastgpt.errors import UserError
from fastgpt.sampling.chat import Rows, Template, encode, open_conversations, template_of
from fastgpt.sampling.streaming import GeneratedText
from fastgpt.sampling.templating import CHATML
from fastgpt.sampling.text import encode_prompt
from tests.convert.models import converted, refused, saved, saved_run, started, theirs
from tests.data.sets import tokenizer_of
from tests.runs import outcome


def messages(*turns):
    return [{"role": role, "content": text} for role, text in turns]


TALK = messages(("user", "hi"), ("assistant", "hello"), ("user", "who"), ("assistant", "me"))
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


def of_bytes(*special, more=()):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*letters, *more))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], fuse_unk=False))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*special])
    return made


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(of_bytes("<|endoftext|>", "<|im_start|>", "<|im_end|>").to_str())


@pytest.fixture
def chats(tmp_path):
    def write(*rows, text=None):
        path = tmp_path / "chats.jsonl"
        path.write_text(text or "".join(json.dumps(row) + "\n" for row in rows))
        return f"--data.source {path}"

    return write


@pytest.mark.parametrize("text", [MARKED, INST], ids=["chatml", "inst"])
def test_text_and_mask_are_those_of_transformers(text, tokenizer):
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


LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
ZEPHYR = (
    "\n{% for m in messages %}{% if m['role'] == 'user' %}[{{ m['content'] }}] {% else %}"
    " {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
)
ELSEWHERE = {  # template, special tokens (the first two begin and end)
    "llama3": (LLAMA3, "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|>"
               " <|eot_id|>"),
    "eos between turns": (ZEPHYR, "<s> </s>"),
}  # fmt: skip


@pytest.fixture(params=ELSEWHERE)
def folder(request, tmp_path):
    """A chat model of others: the one with `</s>` splits words as SentencePiece does."""
    template, special = ELSEWHERE[request.param]
    names = special.split()
    made = of_bytes(*(AddedToken(x, rstrip=x == "<|eot_id|>") for x in names), more=["\u2581"])
    if "</s>" in special:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        made.decoder = decoders.Metaspace()
    begin = processors.TemplateProcessing(f"{names[0]} $A", special_tokens=[(names[0], 257)])
    made.post_processor = processors.Sequence([processors.ByteLevel(), begin])
    saved(theirs("llama", vocab_size=270, eos_token_id=[258, 64]), tmp_path)
    made.save(str(tmp_path / "tokenizer.json"))
    said = {
        "bos_token": {"content": names[0], "__type": "AddedToken"}, "eos_token": names[1],
        "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [66]}')
    return tmp_path


def test_prompts_of_models_of_others_are_those_of_transformers(folder, tmp_path):
    theirs = AutoTokenizer.from_pretrained(folder)
    asked = theirs.apply_chat_template(TALK[:3], add_generation_prompt=True, return_dict=False)
    for place in (folder, converted(folder, tmp_path / "run", "run")):
        found = read(str(place))
        tokenizer, template = found.known_tokenizer(), template_of(found.hf_files)
        tuned = template_of({"chat_template.jinja": template.text})  # what a run keeps
        for each in (template, tuned):
            assert encode(tokenizer, each.pieces(TALK[:3]))[0].tolist() == asked
        for text in ("hi who", " me", ""):
            plain = theirs(text).input_ids or [tokenizer.eot_id]
            assert encode_prompt(text, tokenizer).tolist() == plain
        for end in (258, 64, 66, 65):
            text = GeneratedText(tokenizer, torch.tensor([1]), max_new_tokens=9, temperature=0)
            piece = text.add(torch.eye(270)[end])
            assert piece.finish == (None if end == 65 else "stop")


def test_other_programs_begin_our_conversations_as_we_do(tmp_path):
    run = saved_run(tmp_path / "run", tokenizer_of("bpe"), vocab_size=500)
    kept = json.dumps({"chat_template.jinja": CHATML})
    (read(str(run)).path / "huggingface.json").write_text(kept)
    back = converted(run, tmp_path / "back", "hf")
    theirs = AutoTokenizer.from_pretrained(back)
    asked = theirs.apply_chat_template(TALK[:3], add_generation_prompt=True, return_dict=False)
    assert asked[0] == theirs.eos_token_id
    for place in (run, back):
        found = read(str(place))
        pieces = template_of(found.hf_files).pieces(TALK[:3])
        assert encode(found.known_tokenizer(), pieces)[0].tolist() == asked


def test_the_loss_is_that_of_the_answers(tiny, chats):
    why = messages(("user", "why"), ("assistant", "because"))
    rows = [{"messages": TALK[:2]}, {"prompt": "why", "completion": "because"}, {"messages": TALK}]
    run = started(tiny(FLAGS, chats(*rows)))
    x, y = run.loader.next()
    logits = run.model(x)[..., :256]
    losses = []
    for row in rows[:2]:
        text = Template().render(row.get("messages") or why).encode()
        begin = text.index(b"assistant\n") + len(b"assistant\n")
        [mine] = [i for i in range(2) if bytes(x[i, : len(text) - 1].tolist()) == text[:-1]]
        answer = torch.tensor(list(text[begin:]))
        placed = logits[mine, begin - 1 : len(text) - 1]
        losses.extend(F.cross_entropy(placed, answer, reduction="none"))
    run.loader.close()
    assert len(losses) == (y >= 0).sum()
    assert run.forward(x, y).item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)


def test_a_conversation_is_learnt_by_heart(fit, chats, monkeypatch, capsys):
    run = fit(FLAGS, chats(*[{"messages": TALK}] * 3), "--steps 60 --train.micro-batch 2")
    assert template_of(read(str(run)).hf_files).text == CHATML
    capsys.readouterr()
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
    assert template_of(read(str(run)).hf_files).text == INST


@pytest.mark.parametrize(("bad", "said"), [
    ({"messages": messages(("user", "a"), ("user", "b"))}, "message 2 .*assist"),
    ({"messages": messages(("user", "a"), ("assistant", " "))}, "message 2 .*not empty"),
    ({"messages": messages(("user", "a"))}, "the last message"),
    ({"text": "a"}, "`messages`"),
    ({"prompt": 3, "completion": "b"}, "message 1 .*content"),
    ({"prompt": "a" * 130, "completion": "b"}, r"1\d\d tokens: expected at most"),
])  # fmt: skip
def test_bad_conversations_are_named(bad, said, tiny, chats):
    source = chats({"messages": TALK}, bad)
    refused(tiny(FLAGS, source), f"chats.jsonl, line 2: .*{said}")


def test_bad_files_and_templates_are_named(tiny, chats, tokenizer, tmp_path):
    refused(tiny(FLAGS, chats(text="{")), "chats.jsonl, line 1: not JSON")
    refused(tiny(FLAGS, chats({"messages": TALK})), "has 1 conversations")
    good, file = chats({"messages": TALK}, {"messages": TALK}), tmp_path / "x.jinja"
    flags = tiny(FLAGS, good, f"--data.chat-template {file}")
    for text, said in (
        ("{% if %}", "cannot be read"),
        ("{{ raise_exception('no') }}", "line 1: .*refuses the messages: no"),
        ("{{ messages[-1].content }}", "line 1: .*changes earlier turns"),
    ):
        file.write_text(text)
        refused(flags, said)
    chats({"prompt": "<|im_end|>", "completion": "a"})
    options = {"context": 128, "packed": False, "val_fraction": 0.1}
    for each in (tokenizer, ByteTokenizer()):
        with pytest.raises(UserError, match=r"line 1: a message contains <\|im_end\|>"):
            open_conversations(tmp_path / "chats.jsonl", each, Template(), **options)
    with pytest.raises(UserError, match="has no chat template"):
        sample.main([str(saved_run(tmp_path / "run", tokenizer)), "--chat"])
