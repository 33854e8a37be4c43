"""The Python API: the examples in its docstrings run, its types are known, its errors are clear."""

import doctest
import json
import os
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

import fastgpt
from fastgpt.data.tokenizers import ByteTokenizer
from fastgpt.errors import UserError
from fastgpt.ops.tables import select
from tests.convert.models import saved_run
from tests.processes import ROOT, ended

WITHOUT = {"Config", "ModelConfig", "OpsConfig", "RECIPES"}
METHODS = ("GPT.from_config", "GPT.forward", "GPT.generate")


@pytest.mark.parametrize("name", [*sorted({*fastgpt._MODULES} - WITHOUT), *METHODS])
def test_the_examples_run(name, tmp_path, monkeypatch, one_thread):
    monkeypatch.setattr("fastgpt.device.device.measured_peak", lambda *_: 1e11)
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("the cat sat on the mat. " * 60)
    saved_run(Path("runs/mine"), ByteTokenizer(), vocab_size=256)
    names = {"fastgpt": fastgpt, "torch": torch}
    found = doctest.DocTestFinder(recurse=False).find(
        resolve_name(f"fastgpt:{name}"), name, module=False, globs=names
    )
    runner, said = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), []
    [failed, tried] = runner.run(found[0], out=said.append)
    assert tried
    assert not failed, "".join(said)


USE = """# pyright: strict
import fastgpt
from fastgpt.config import DataConfig, TrainConfig
from torch import Tensor

model = fastgpt.ModelConfig(num_layers=1, num_heads=2, dim=16, context=16)
config = fastgpt.Config(model=model, data=DataConfig(source="mine.txt"), train=TrainConfig())
trainer = fastgpt.Trainer(config)
trainer.fit()
gpt, tokenizer = fastgpt.load(str(trainer.run_dir))
assert tokenizer is not None
ids: Tensor = fastgpt.encode_prompt("a", tokenizer, "prompt")
more: Tensor = fastgpt.generate(gpt, ids, max_new_tokens=4)
"""
MISUSE = """
fastgpt.Config(step=2)
fastgpt.ModelConfig(num_layers="one")
fastgpt.generate(gpt, ids)
tokenizer.decoded
fastgpt.unknown
"""


def test_the_types_of_the_public_names_are_known(tmp_path):
    """A user's script under pyright's strictest rules: right use passes, each misuse is found."""
    script = tmp_path / "mine.py"
    script.write_text(USE + MISUSE)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ("pyright", "--outputjson", "--pythonpath", sys.executable, script)
    done = ended(*command, PYTHONPATH=str(ROOT), PATH=path)
    found = json.loads(done.stdout)["generalDiagnostics"]
    first = USE.count("\n") + 1
    expected = set(range(first, first + MISUSE.count("\n") - 1))
    assert {x["range"]["start"]["line"] for x in found} == expected, found
    assert (ROOT / "fastgpt" / "py.typed").is_file()


def test_errors_name_what_is_wrong():
    config = fastgpt.ModelConfig(num_layers=1, num_heads=2, dim=16, context=8)
    with pytest.raises(UserError, match="vocab_size"):
        fastgpt.build_model(config, select(fastgpt.OpsConfig(), "cpu"))
    model = fastgpt.GPT.from_config(config, vocab_size=50)  # padded to 64
    for call in (model, lambda tokens: model.generate(tokens, max_new_tokens=1)):
        with pytest.raises(UserError, match="from 0 to 50"):
            call(torch.tensor([[0, 50]]))
    tokens = torch.zeros(1, 9, dtype=torch.long)
    with pytest.raises(UserError, match="9 tokens"):
        model(tokens)
    assert model.generate(tokens, max_new_tokens=1).shape == (1, 10)
    for wrong in (torch.tensor([[-1]]), torch.tensor([1]), tokens.float()):
        with pytest.raises(UserError, match="expected"):
            model.generate(wrong, max_new_tokens=1)
    with pytest.raises(UserError, match="layers"):
        fastgpt.GPT.from_config(layers=1, vocab_size=3)
