"""Files of nanoGPT and llm.c are read as the formats say, and what is wrong with them is named."""

import pytest
import torch

from fastgpt.errors import UserError
from tests.convert.models import CONTEXT, SUFFIX, V, converted, foreign, same, saved_run, weights


@pytest.fixture
def written(tmp_path):
    """Returns a run, and the file of another program that has its model."""

    def write(kind, **options):
        activation = {"nanogpt": "gelu_erf", "llmc": "gelu_tanh"}[kind]
        run = saved_run(tmp_path / "run", activation=activation, **options)
        return run, foreign(run, kind, tmp_path / f"x{SUFFIX[kind]}")

    return write


@pytest.mark.parametrize(("kind", "options"), [
    ("nanogpt", {"dtype": torch.bfloat16}), ("llmc", {}), ("llmc", {"dtype": torch.bfloat16}),
])  # fmt: skip
def test_every_bit_is_read_and_converted(kind, options, written, tmp_path):
    run, file = written(kind, **options)
    assert same(weights(run), weights(converted(file, tmp_path / "again", "run")))


def test_a_compiled_models_checkpoint_is_read(written):
    run, file = written("nanogpt", bias=False)
    saved = torch.load(file, weights_only=True)
    saved["model"] = {f"_orig_mod.{name}": x for name, x in saved["model"].items()}
    mask = torch.ones(1, 1, CONTEXT, CONTEXT).tril()
    saved["model"]["_orig_mod.transformer.h.0.attn.bias"] = mask
    saved |= {"optimizer": {"state": {}, "param_groups": []}, "iter_num": 10, "config": {"a": 1}}
    torch.save(saved, file)
    assert same(weights(run), weights(file))


class Evil:
    """Would run code if it was unpickled."""

    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle ran')",)


NANOCHAT = {"transformer.wte.weight": torch.zeros(1), "transformer.h.0.attn.c_q.weight": 0}


@pytest.mark.parametrize("content", [{"model": Evil(), "model_args": {}}, NANOCHAT, [1], None])
def test_other_pickles_are_refused_and_do_not_run(content, tmp_path):
    file = tmp_path / "ckpt.pt"
    torch.save(content, file)
    with pytest.raises(UserError, match="is not a checkpoint of nanoGPT"):
        weights(file)


def test_damaged_files_are_named(written):
    _, file = written("llmc")
    whole = file.read_bytes()
    for content, said in (
        (whole[:-1], rf"{len(whole) - 1:,} bytes: expected {len(whole):,}"),
        (b"\0" * 2000, r"begins with \[0, 0\]"),
    ):
        file.write_bytes(content)
        with pytest.raises(UserError, match=said):
            weights(file)


def test_a_checkpoint_with_other_tensors_is_named(written):
    _, file = written("nanogpt")
    saved = torch.load(file, weights_only=True)
    name = "transformer.ln_f.bias"
    last = saved["model"].pop(name)
    for extra, said in (
        ({}, r"no tensor ln_f\.bias"),
        ({name: last, "lm_head.weight": torch.ones(V, 32)}, r"lm_head\.weight is not wte\.weight"),
    ):
        torch.save(saved | {"model": saved["model"] | extra}, file)
        with pytest.raises(UserError, match=said):
            weights(file)
