"""Runs of other programs that go on here: the next losses are those that they would have had.

The other program is transformers' GPT-2 in a plain loop, saved as nanoGPT and llm.c do.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fastgpt.cli import parse
from fastgpt.config.model import ModelConfig
from fastgpt.convert.llmc import write_llmc
from fastgpt.convert.nanogpt import write_nanogpt
from fastgpt.train.engine import build_engine
from fastgpt.train.trainer import Trainer
from tests.convert.models import CONTEXT, refused, saved_run, theirs
from tests.runs import series

V, FLAGS = 300, "--data.tokenizer bytes --take-over --steps 20 "


class Other:
    """Another program's model after ten steps of AdamW with two groups, as nanoGPT has them."""

    def __init__(self, activation):
        self.model = theirs("gpt2", vocab_size=V, activation_function=activation).train()
        ours = {"gelu": "gelu_erf", "gelu_new": "gelu_tanh"}[activation]
        sizes = {"num_layers": 2, "num_heads": 4, "dim": 32, "context": CONTEXT, "vocab_size": V}
        self.config = ModelConfig(**sizes, activation=ours)
        weights = dict(self.model.named_parameters())
        groups = [{x: p for x, p in weights.items() if p.dim() == dim} for dim in (2, 1)]
        self.names = [name for group in groups for name in group]
        self.adamw = torch.optim.AdamW(
            [{"params": group.values(), "weight_decay": w} for group, w in zip(groups, (0.1, 0))],
            lr=2e-3, betas=(0.9, 0.95),
        )  # fmt: skip
        for _ in range(10):
            self.train_step(*torch.randint(256, (2, 2, CONTEXT)))

    def train_step(self, x, y):
        loss = nn.functional.cross_entropy(self.model(x).logits.flatten(0, 1), y.flatten())
        self.adamw.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adamw.step()
        return loss.item()

    def named(self, key=None):
        """Returns weights, or with a key AdamW's state, under the names and in the form of ours."""
        found = {}
        for name, p in self.model.named_parameters():
            x = p.detach() if key is None else self.adamw.state[p][key]
            turned = ".c_" in name and x.dim() == 2
            found[name.removeprefix("transformer.")] = x.mT.contiguous() if turned else x
        return found


def nanogpt(other, folder, **changes):
    file = folder / "ckpt.pt"
    write_nanogpt(other.config, other.named(), file)
    state, kinds = other.adamw.state_dict(), ("exp_avg", "exp_avg_sq")
    named = {kind: other.named(kind) for kind in (*kinds, "step")}
    for i, name in enumerate(other.names):
        short = name.removeprefix("transformer.")
        state["state"][i] = {kind: x[short] for kind, x in named.items()}
    saved = torch.load(file, weights_only=True)
    torch.save(saved | {"optimizer": state, "iter_num": 10, "config": {"a": 1}} | changes, file)
    return file


def llmc(other, folder, dtype=torch.float32):
    """Writes model and state; with bf16 the state has the weights in fp32."""
    file, rounded = folder / "model_00000010.bin", dtype != torch.float32
    content = np.zeros(256, "<i4")
    content[[0, 1, 2, 4, 10]] = 20240527, 1, 1, rounded, 10
    content = content.tobytes()
    for key in ("exp_avg", "exp_avg_sq", None)[: 2 + rounded]:
        write_llmc(other.config, other.named(key), file)
        content += file.read_bytes()[1024:]
    (folder / "state_00000010_00000.bin").write_bytes(content)
    write_llmc(other.config, {name: x.to(dtype) for name, x in other.named().items()}, file)
    return file


@pytest.mark.parametrize("write", [nanogpt, llmc, partial(llmc, dtype=torch.bfloat16)])
def test_the_next_losses_are_those_of_the_other_program(write, argv, tmp_path, monkeypatch):
    other, said, batches = Other("gelu" if write is nanogpt else "gelu_new"), [], []
    engine = build_engine(parse(argv(write(other, tmp_path), FLAGS)), said.append)
    draw = engine.loader.next
    monkeypatch.setattr(engine.loader, "next", lambda: batches.append(draw()) or batches[-1])
    for step in range(11, 16):
        engine.train_step()
        assert engine.step == step == 10 + len(batches)
        assert engine.train_loss.item() == pytest.approx(other.train_step(*batches[-1]), rel=1e-5)
    last = " (its last learning rate was 0.002)" if write is nanogpt else ""
    assert f"after step 10 with learning rate 0.002{last}; the data begins anew" in said[-1]


def test_it_is_a_run_like_any_other(argv, tmp_path, capsys):
    file = nanogpt(Other("gelu"), tmp_path)
    Trainer(parse(argv(file, FLAGS + "--optim.weight-decay 0.2 --steps 12"))).fit()
    said = f"--optim.weight-decay is 0.2: {file} was trained with 0.1"
    assert said in " ".join(capsys.readouterr().out.split())
    file.unlink()
    Trainer(parse(["--resume", str(tmp_path / "run"), "--steps", "13"])).fit()
    assert list(series(tmp_path / "run", "train_loss")) == [11, 12, 13]


def test_what_cannot_be_taken_over_is_named(argv, tmp_path):
    other, run = Other("gelu"), saved_run(tmp_path / "ours", vocab_size=V)
    file = nanogpt(other, tmp_path)
    refused(argv(file, FLAGS + "--steps 9"), r"--steps is 9: .*ckpt\.pt is already at step 10")
    refused(argv(file, FLAGS + "--optim.kind muon"), r"is muon: --take-over continues AdamW")
    refused(argv(file, FLAGS + "--model.context 20"), r"--model\.context is 20: expected 40, as")
    refused(argv(run, FLAGS), r"has no state to take over: expected nanoG")
    state = torch.load(file, weights_only=True)["optimizer"]
    for optimizer in ({}, state | {"param_groups": state["param_groups"][::-1]}):
        file = nanogpt(other, tmp_path, optimizer=optimizer)
        refused(argv(file, FLAGS), r"no optimizer's state of its weights, as nanoGPT's train\.py")
    file, state = llmc(Other("gelu_new"), tmp_path), tmp_path / "state_00000010_00000.bin"
    whole = state.read_bytes()
    state.write_bytes(whole[:-4])
    refused(argv(file, FLAGS), rf"has {len(whole) - 4:,} bytes: .*at least {len(whole):,}")
    state.write_bytes(b"\0" * len(whole))
    refused(argv(file, FLAGS), r"begins with \[0, 0\] .*: expected \[20240527, 1\]")
    state.unlink()
    refused(argv(file, FLAGS), r"has no optimizer's state beside it: expected model_")
