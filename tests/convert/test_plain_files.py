"""Files of nanoGPT and llm.c, compared byte by byte with what the formats say."""

import re

import numpy as np
import pytest
import torch

from fastgpt.errors import UserError
from tests.convert.models import CONTEXT, V, converted, same, saved_run, weights

LAYER = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
OPTIONS = {"nanogpt": {"activation": "gelu_erf"}, "llmc": {}}
SUFFIX = {"nanogpt": "pt", "llmc": "bin"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", OPTIONS)
def test_back_and_forth_every_bit_is_the_same(kind, dtype, tmp_path):
    run = saved_run(tmp_path / "run", dtype=dtype, **OPTIONS[kind])
    file = converted(run, tmp_path / f"model.{SUFFIX[kind]}", kind)
    again = converted(file, tmp_path / "again", "run")
    assert same(weights(run), weights(again))


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpts_names_and_settings(bias, tmp_path):
    run = saved_run(tmp_path / "run", activation="gelu_erf", bias=bias, dropout=0.2)
    file = converted(run, tmp_path / "ckpt.pt", "nanogpt")
    saved = torch.load(file, weights_only=True)
    assert saved["model_args"] == {
        "n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": CONTEXT, "vocab_size": V,
        "bias": bias, "dropout": 0.2,
    }  # fmt: skip
    kinds = ("weight", "bias") if bias else ("weight",)
    names = {f"h.{i}.{part}.{kind}" for i in range(2) for part in LAYER for kind in kinds}
    names |= {"wte.weight", "wpe.weight", *(f"ln_f.{kind}" for kind in kinds)}
    assert saved["model"].keys() == {f"transformer.{x}" for x in names} | {"lm_head.weight"}
    ours = weights(run)
    assert all(torch.equal(saved["model"][f"transformer.{name}"], ours[name]) for name in names)
    assert torch.equal(saved["model"]["lm_head.weight"], ours["wte.weight"])


def test_a_compiled_models_checkpoint_is_read(tmp_path):
    run = saved_run(tmp_path / "run", activation="gelu_erf", bias=False)
    saved = torch.load(converted(run, tmp_path / "ckpt.pt", "nanogpt"), weights_only=True)
    saved["model"] = {f"_orig_mod.{name}": x for name, x in saved["model"].items()}
    mask = torch.ones(1, 1, CONTEXT, CONTEXT).tril()
    saved["model"]["_orig_mod.transformer.h.0.attn.bias"] = mask
    saved |= {"optimizer": {"state": {}, "param_groups": []}, "iter_num": 10, "config": {"a": 1}}
    torch.save(saved, tmp_path / "compiled.pt")
    assert same(weights(run), weights(tmp_path / "compiled.pt"))


@pytest.mark.parametrize(("dtype", "version"), [("fp32", 3), ("bf16", 5)])
def test_llmcs_bytes(dtype, version, tmp_path):
    run = saved_run(tmp_path / "run")
    file = converted(run, tmp_path / "gpt2.bin", "llmc", dtype=dtype)
    header = [20240326, version, CONTEXT, V, 2, 4, 32, 128]
    parts = [np.array(header + [0] * (256 - len(header)), np.int32).tobytes()]
    ours = weights(run)
    names = [
        "wte.weight", "wpe.weight",
        *(f"h.{i}.{part}.{kind}" for part in LAYER for kind in ("weight", "bias") for i in (0, 1)),
        "ln_f.weight", "ln_f.bias",
    ]  # fmt: skip
    for name in names:
        x = ours[name]
        if name == "wte.weight":
            x = torch.cat((x, torch.zeros(128 - V, 32)))
        x = x.numpy() if dtype == "fp32" else x.bfloat16().view(torch.int16).numpy()
        parts.append(x.tobytes())
    assert file.read_bytes() == b"".join(parts)


class Evil:
    """Would run code if it was unpickled."""

    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle ran')",)


def test_no_pickle_runs(tmp_path):
    file = tmp_path / "ckpt.pt"
    torch.save({"model": Evil(), "model_args": {}}, file)
    with pytest.raises(UserError, match=r"is no checkpoint of nanoGPT: "):
        weights(file)


def test_nanochat_is_refused_by_the_names_of_its_parts(tmp_path):
    names = ("transformer.wte.weight", "transformer.h.0.attn.c_q.weight", "lm_head.weight")
    more = ("x0_lambdas", "value_embeds.1.weight")
    for prefix, extra, said in (("", (), "$"), ("_orig_mod.", more, ", value_embeds, x0_lambdas$")):
        content = {f"{prefix}{name}": torch.zeros(1) for name in (*names, *extra)}
        torch.save(content, tmp_path / "model_000650.pt")
        with pytest.raises(UserError, match=rf"it is nanochat's, .* a normalised embedding{said}"):
            weights(tmp_path / "model_000650.pt")


def written(kind, tmp_path):
    run = saved_run(tmp_path / "run", **OPTIONS[kind])
    return converted(run, tmp_path / f"x.{SUFFIX[kind]}", kind, verify=False)


def test_damaged_files_are_named(tmp_path):
    file = written("llmc", tmp_path)
    whole = file.read_bytes()
    for content, said in (
        (whole[:-1], rf"x\.bin has {len(whole) - 1:,} bytes: expected {len(whole):,}"),
        (whole[:100], r"x\.bin is no model of llm\.c: it begins with \[20240326, 3\]"),
        (b"\0" * 2000, r"begins with \[0, 0\], expected 20240326 and version 3 or 5"),
    ):
        file.write_bytes(content)
        with pytest.raises(UserError, match=said):
            weights(file)


def test_a_checkpoint_with_other_tensors_is_named(tmp_path):
    file = written("nanogpt", tmp_path)
    saved = torch.load(file, weights_only=True)
    last = saved["model"].pop("transformer.ln_f.bias")
    for extra, said in (
        ({}, r"x\.pt has no tensor ln_f\.bias"),
        ({"transformer.ln_f.bias": last[:3]}, r"ln_f\.bias has the shape \(3,\): expected \(32,\)"),
        ({"transformer.ln_f.bias": last, "extra": last}, r"has an unknown tensor extra"),
        (
            {"transformer.ln_f.bias": last, "lm_head.weight": torch.ones(V, 32)},
            r"lm_head\.weight is not wte\.weight",
        ),
    ):
        torch.save(saved | {"model": saved["model"] | extra}, file)
        with pytest.raises(UserError, match=said):
            weights(file)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("nanogpt", {}, "--model.activation is gelu_tanh, expected gelu_erf"),
        ("nanogpt", {"tied": False}, "--model.tied is False, expected True"),
        (
            "nanogpt",
            {"activation": "gelu_erf", "embedding_dropout": 0.5},
            "its dropouts are [0.0, 0.5]",
        ),
        ("llmc", {"bias": False}, "--model.bias is False, expected True"),
        ("llmc", {"ffn_dim": 100}, "--model.ffn-dim is 100, expected None"),
    ],
)
def test_what_a_program_cannot_express_is_refused_by_name(kind, options, said, tmp_path):
    run = saved_run(tmp_path / "run", **options)
    with pytest.raises(UserError, match=rf"cannot express this model: .*{re.escape(said)}"):
        converted(run, tmp_path / f"x.{SUFFIX[kind]}", kind)
    with pytest.raises(UserError, match=r"is for \w+: expected a name with \."):
        converted(run, tmp_path / "x", kind)
