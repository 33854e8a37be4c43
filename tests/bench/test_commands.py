"""Commands of the benchmarks: wrong flags and values get one line, and every flag is explained."""

import importlib

import pytest

from fastgpt.errors import UserError


@pytest.mark.parametrize(
    ("name", "argv", "message"),
    [
        ("bench.__main__", "--rounds many", "--rounds: no type matching {None}|INT"),
        ("bench.__main__", "--quik", "unknown argument '--quik'; did you mean '--quick'"),
        ("bench.step", "--starts 3", "invalid choice '3' for argument '--starts'"),
        ("bench.race", "", "Missing from python -m bench.race: --nanogpt PATH"),
        ("bench.reproduce", "--device gpu", "invalid choice 'gpu' for argument '--device'"),
        ("bench.host", "--calls 0", "--calls is 0"),
        ("bench.host", "--rounds 1", "--rounds is 1: expected 1 or more, 2 or more"),
    ],
)
def test_wrong_arguments_get_one_line(name, argv, message):
    with pytest.raises(UserError) as caught:
        importlib.import_module(name).main(argv.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        *("__main__", "convergence", "data", "host", "memory"),
        *("race", "report", "reproduce", "step"),
    ],
)
def test_every_flag_is_explained(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"bench.{name}").main(["--help"])
    assert not stopped.value.code
    usage, about, flags = capsys.readouterr().out.split("\n\n")
    assert usage.startswith("usage: python -m bench")
    assert about.endswith(".")
    assert all(len(line.split()) > 1 for line in flags.splitlines() if line.startswith("  --"))
