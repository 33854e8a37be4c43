"""Layers whose work ranks share: dropout's masks, the rows of each rank, what is refused."""

import re

from fastgpt.config.model import ModelConfig
from fastgpt.parallel.fsdp import qkv_permutation
from tests.runs import finish, outcome, torchrun

TP = "--parallel.kind fsdp --parallel.tp 2"

TWICE = """
import os, sys
import torch
from fastgpt.cli import configure
from fastgpt.faults.failure import abort_all_ranks
from fastgpt.parallel import parallelize
from fastgpt.train.trainer import Trainer
build_model = parallelize.build_model
def told(*args, **options):
    model = build_model(*args, **options)
    os.write(1, f"built on {model.wte.weight.device.type}\\n".encode())  # in one piece
    return model
parallelize.build_model = told
with abort_all_ranks():
    for run in ("a", "b"):
        trainer = Trainer(configure([*sys.argv[2:], "--run-dir", sys.argv[1] + "/" + run]))
        trainer.fit()
    for name, weight in trainer.run.model.named_parameters():
        one, other = trainer.world.gather(weight.detach().to_local().reshape(1, -1))
        kind = "replicated" if weight.placements[-1].is_replicate() else "cut"
        if trainer.world.is_main:
            print("parts", name, kind, torch.equal(one, other), flush=True)
"""


PLACES = "--model.dropout-places embedding residual feed_forward"


def test_ranks_draw_the_same_masks_for_what_they_share(tiny, tmp_path):
    (tmp_path / "train.py").write_text(TWICE)
    flags = f"{TP} --model.dropout 0.2 {PLACES} --train.micro-batch 2"
    out = finish(torchrun(2, str(tmp_path / "train.py"), str(tmp_path), *tiny(flags), forks=True))
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")
    assert (out.count("built on meta"), out.count("built on cpu")) == (4, 2), "whole on one rank"
    parts = re.findall(r"^parts (\S+) (replicated|cut) (True|False)$", out, re.MULTILINE)
    assert {kind for _, kind, _ in parts} == {"replicated", "cut"}
    for name, kind, equal in parts:
        assert (kind, equal) in {("replicated", "True"), ("cut", "False")}, name


def test_a_rank_has_its_queries_with_their_keys_and_values():
    """By hand: four query heads of width 2, two key/value heads, and SwiGLU's gate of width 4."""
    config = ModelConfig(num_heads=4, num_kv_heads=2, dim=8, ffn_dim=4, activation="swiglu")
    order = qkv_permutation(config, "h.3.attn.c_attn.weight", 2)
    queries, keys, values = [0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]
    expected = queries[:4] + keys[:2] + values[:2] + queries[4:] + keys[2:] + values[2:]
    assert order is not None
    assert order.tolist() == expected
    gates = qkv_permutation(config, "h.3.mlp.c_fc.bias", 2)
    assert gates is not None
    assert gates.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    for name in ("wte.weight", "h.3.mlp.c_proj.weight", "h.3.ln_1.weight"):
        assert qkv_permutation(config, name, 2) is None
