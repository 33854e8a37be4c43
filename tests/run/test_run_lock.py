"""One process at a time writes in a run's directory, and writes nothing outside of it."""

import pytest

from fastgpt.errors import UserError
from fastgpt.run.directory import RunLock


def test_links_in_a_run_are_refused_but_the_run_itself_may_be_one(tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    for name in (".lock", "samples.txt", "loss.png"):
        (run / name).symlink_to(outside)
        with pytest.raises(UserError, match=rf"{run / name} is a symbolic link"):
            RunLock(run)
        (run / name).unlink()
    outside.symlink_to(run)
    RunLock(outside).release()
