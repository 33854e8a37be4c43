"""Commands of the benchmarks: wrong flags and values get one line, and every flag is explained."""

import importlib
import re

import pytest

from bench import records
from fastgpt.errors import UserError


@pytest.mark.parametrize(
    ("name", "argv", "message"),
    [
        ("__main__", "--rounds many", "--rounds is ['many']: expected an integer or None"),
        ("__main__", "--quik", "unknown flag '--quik'; did you mean '--quick'?"),
        ("__main__", "--only step/nothing", "step/nothing: expected step/shakespeare-cpu"),
        ("step", "--starts 3", "--starts is '3': expected"),
        ("step", "gpt3", "unknown recipe 'gpt3'"),
        ("step", "--implementations eagre", "unknown implementation 'eagre'; did you mean 'eager'"),
        ("step", "--implementations nanogpt", "implementation nanogpt needs --nanogpt PATH"),
        ("step", "--rounds 0", "--rounds is 0: expected 1 or more"),
        ("step", "--batch 4 0", "--batch 0: expected 1 or more"),
        ("step", "--busy -1", "--busy is -1: expected 0 or more"),
        ("step", "--implementations nanochat", "implementation nanochat needs --nanochat PATH"),
        ("cpu", "--recipes gpt2", "--recipes gpt2: expected some of baby, "),
        ("cpu", "--processes bayb", "unknown recipe 'bayb'; did you mean 'baby'"),
        ("cpu", "--rounds 0", "--rounds is 0: expected 1 or more"),
        ("race", "", "missing: --nanogpt (see python -m bench.race --help)"),
        ("host", "--calls 0", "--calls is 0"),
        ("host", "--rounds 1", "--rounds is 1: expected 1 or more, 2 or more"),
        ("reproduce", "--device gpu", "--device is 'gpu': expected"),
        ("generate", "--rounds 1", "--rounds is 1: expected 2 or more"),
        ("generate", "--prompt 3", "--prompt is 3: expected 4 or more"),
        ("generate", "shakespeare-cpu --tokens 1", "--tokens is 1: expected at most 64 in all"),
        ("generate", "gpt2-124m-modern", "differs from GPT-2's in norm, activation, position"),
        ("generate", "gpt3", "unknown recipe 'gpt3'"),
        ("generate", "shakespeare-cpu --prompt 8 --nanogpt nowhere", "expected a checkout"),
    ],
)
def test_wrong_arguments_get_one_line(name, argv, message, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    with pytest.raises(UserError) as caught:
        importlib.import_module(f"bench.{name}").main(argv.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "name",
    [
        "__main__",
        "convergence",
        "cpu",
        "data",
        "host",
        "memory",
        "race",
        "report",
        "reproduce",
        "step",
    ],
)
def test_every_flag_is_explained(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"bench.{name}").main(["--help"])
    assert not stopped.value.code
    usage, about, flags = capsys.readouterr().out.split("\n\n", 2)
    assert usage.startswith("usage: python -m bench")
    assert about.endswith(".")
    explained = re.split(r"^  (?=\S)", flags, flags=re.M)[1:]
    assert explained
    assert all(re.search(r"\n {6}[A-Z].*\.\Z", text.rstrip(), re.S) for text in explained)
