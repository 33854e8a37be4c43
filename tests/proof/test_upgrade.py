"""`python -m kernels.upgrade`: two versions of Triton, each from a folder of its own."""

import os
from importlib.metadata import version
from pathlib import Path

import pytest

from fastgpt.kernels import upgrade
from tests.processes import python


def test_what_cannot_be_compared_is_exit_status_2(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert upgrade.main(["--from", "0.1", "--to", "0.2", "--folder", str(tmp_path)]) == 2
    assert "pip cannot install triton==0.1.*" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        upgrade.main(["--to", "newest"])
    assert ended.value.code == 2


@pytest.mark.slow
def test_a_version_beside_itself_differs_in_nothing(tmp_path):
    import triton

    installed = version("triton")
    (tmp_path / f"triton-{installed}").mkdir()
    (tmp_path / f"triton-{installed}" / "triton").symlink_to(Path(triton.__file__).parent)
    cache = os.path.join(os.environ["FASTGPT_CACHE"], "triton")
    done = python(
        "-m", "kernels.upgrade", "--to", installed, "--brief", "--op", "rotary",
        "--folder", tmp_path, TRITON_INTERPRET=None, TRITON_CACHE_DIR=cache,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"upgrade Triton {installed} to {installed}? yes, nothing is worse" in done.stdout
    assert "rotary: executed\n1 compiled" in done.stdout
