"""Foreign files take neither much memory nor time, and what is wrong with them is one line."""

import faulthandler
import io
import json
import zipfile

import pytest
import torch

from fastgpt.checkpoint.tensors import LONGEST_HEADER, read, unpickle
from fastgpt.config.model import ModelConfig
from fastgpt.convert.nanogpt import read_nanogpt
from fastgpt.data.tokenizers.huggingface import JsonTokenizer
from fastgpt.errors import UserError
from fastgpt.sampling.chat import Template, template_of
from tests.data.sets import tokenizer_of
from tests.faults.hostile import TALK, cpu_s
from tests.faults.mutations import PIECES, compressed


@pytest.fixture(autouse=True)
def cheap():
    """Ends everything after a minute, in loops of C, too; fails after 5 s of CPU time."""
    faulthandler.dump_traceback_later(60, exit=True)
    began = cpu_s()
    yield
    faulthandler.cancel_dump_traceback_later()
    assert cpu_s() - began < 5


def nested(make, levels=60):
    value = make((1,))
    for _ in range(levels):
        value = make((value, value))
    return value


def saved(value):
    torch.save(value, file := io.BytesIO())
    return file


def packed(steps, members=0):
    """An archive like those of torch.save around the steps of a pickle."""
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        for name in ("data.pkl", *(f"{i:200}" for i in range(members))):
            archive.writestr(f"x/{name}", steps)
    return file


TWICE = b"".join(b"q%ch%c\x86" % (i, i) for i in range(60))
NO_END = ": its values are too many, or refer to each other"
ARCHIVES = {
    "tuples": (lambda: saved(nested(tuple)), NO_END),
    "lists": (lambda: saved(nested(list)), NO_END),
    "a setting": (lambda: saved({"model": {}, "model_args": {"bias": nested(tuple)}}), NO_END),
    "a key": (lambda: packed(b"\x80\x02}K\x01" + TWICE + b"K\x01s."), NO_END),
    "deep": (lambda: packed(b"\x80\x02}K\x01" + b"\x85" * 300_000 + b"K\x01s."), NO_END),
    "a few": (lambda: saved(nested(tuple, 5)), " a dictionary with model and model_args: "),
    "zeros": (lambda: io.BytesIO(compressed(saved([1]), bytes(2**26))), ": its members are compr"),
    "bytes": (lambda: saved(bytearray(9)), ": it makes an array of bytes"),
    "members": (lambda: packed(b"N.", 9000), ": it is no archive as .* too many members"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_what_would_unpack_to_more_than_it_is_is_refused(name, tmp_path):
    make, said = ARCHIVES[name]
    (tmp_path / "ckpt.pt").write_bytes(make().getvalue())
    with pytest.raises(UserError, match=rf"ckpt\.pt .*{said}"):
        read_nanogpt(tmp_path / "ckpt.pt")


def test_what_torch_saves_is_read(tmp_path):
    betas = (0.9, 0.95)
    groups = [{"betas": betas, "params": [i]} for i in range(60)]
    state = {i: {"exp_avg": torch.ones(3), "step": torch.tensor(1.0)} for i in range(900)}
    torch.save({"state": state, "param_groups": groups}, tmp_path / "state.pt")
    assert unpickle(tmp_path / "state.pt")["param_groups"] == groups


def test_counts_have_limits(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((2 * LONGEST_HEADER).to_bytes(8, "little") + bytes(3 * LONGEST_HEADER))
    with pytest.raises(UserError, match=r"has a header of 8,388,608 bytes: expected at most 4,"):
        read(path)
    with pytest.raises(UserError, match=r"--model\.num-layers is 257: expected 1 to 256"):
        ModelConfig(num_layers=257)


MEMORY, TOO_DEEP = r"takes more than 256 MiB of memory", r"\w+ .*: .*maximum recursion"


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, "takes more than 1 s"), (2, MEMORY), (3, TOO_DEEP), (4, TOO_DEEP), (5, MEMORY)],
)
def test_a_foreign_template_has_limits(number, said):
    with pytest.raises(UserError, match=rf"^the chat template {said}[^\n]*$"):
        Template(PIECES[number]).render(TALK)
    assert Template("{{ messages[1].content }}").render(TALK) == "on a mat"


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_a_damaged_file_with_a_template_is_named(text):
    with pytest.raises(UserError, match=r"^tokenizer_config\.json cannot be read: "):
        template_of({"tokenizer_config.json": text})


def normalizing(pattern, text, times=1):
    """The file of a tokenizer that first replaces a pattern in the text."""
    step = {"type": "Replace", "pattern": {"Regex": pattern}, "content": text}
    steps = {"normalizer": {"type": "Sequence", "normalizers": [step] * times}}
    return json.dumps(json.loads(tokenizer_of("bpe").to_json()) | steps)


@pytest.mark.parametrize(
    ("pattern", "text", "times", "said"),
    [("(", "", 1, "unmatched paren"), ("(a+)+$", "", 1, "retry-limit"),
     ("q", 100 * "q", 1, "over 64 times as long"), ("q", "qq", 40, "takes more than 1 s")],
)  # fmt: skip
def test_a_foreign_tokenizer_is_tried_within_limits(pattern, text, times, said, capfd):
    content = normalizing(pattern, text, times)
    capfd.readouterr()
    with pytest.raises(UserError, match=rf"^[^\n]*{said}[^\n]*$"):
        JsonTokenizer(content)
    assert capfd.readouterr() == ("", "")


def test_a_panic_over_a_later_text_is_one_line():
    tokenizer = JsonTokenizer(normalizing("(a+)+$", ""), own=True)
    with pytest.raises(UserError, match=r"^the bpe tokenizer cannot encode a text: [^\n]*$"):
        tokenizer.encode("a" * 40 + "!")
