"""`make bench-regress`: a baseline for each machine, and a failure if an op is 10 % slower."""

import json
from unittest import mock

import pytest

from bench import regress
from fastgpt.files import cache_dir


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FASTGPT_CACHE", str(tmp_path))


@pytest.mark.slow
def test_slower_than_the_baseline_by_more_than_a_tenth_fails(no_cache, capfd, monkeypatch):
    name = regress.device.device_name("cpu")
    only = ["-k", "add_layer_norm"]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # with it nothing is measured
    assert regress.main([*only, "--save"]) == 0
    (path,) = regress.storage(name).glob("*/*_baseline.json")
    saved = json.loads(path.read_text())
    assert saved["machine_info"]["node"] == ""
    assert saved["machine_info"]["device"] == name
    (stats,) = (bench["stats"] for bench in saved["benchmarks"])
    stats["min"] /= 5  # its fastest round was much faster, whatever else the machine does
    path.write_text(json.dumps(saved))
    assert regress.main(only) == 1
    printed = capfd.readouterr()
    assert "Performance has regressed" in printed.out + printed.err
    assert "no baseline" not in printed.out


def test_without_a_baseline_nothing_is_compared_and_that_is_said(no_cache, capsys, monkeypatch):
    subprocess = mock.Mock()
    subprocess.run.return_value.returncode = 0
    monkeypatch.setattr(regress, "subprocess", subprocess)
    assert regress.main([]) == 0
    assert "no baseline for" in capsys.readouterr().out
    assert not any("compare" in argument for argument in subprocess.run.call_args.args[0])


def test_baselines_of_devices_are_kept_apart():
    a, b = regress.storage("NVIDIA H200"), regress.storage("NVIDIA A100")
    assert a != b
    assert cache_dir() in a.parents
