"""One process at a time writes in a run's directory, and writes nothing outside of it."""

import platform
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from fastgpt.errors import UserError
from fastgpt.run.lock import RunLock


@pytest.mark.parametrize(
    ("text", "job", "named"),
    [
        (f"process 12 on {platform.node()}", "none", None),
        ("process 12 on elsewhere", "none", "process 12 on elsewhere"),
        ("process 12 on elsewhere in job 7", "7", None),
        ("process 12 on elsewhere in job 7", "8", "process 12 on elsewhere in job 7"),
        (f"process \udcff on {platform.node()}", "none", "an unknown process"),
        ("", "none", "an unknown process"),
    ],
)
def test_holder_that_may_still_run_is_named_and_others_are_replaced(
    tmp_path, monkeypatch, text, job, named
):
    holder = tmp_path / ".holder"
    holder.write_text(text, errors="surrogateescape")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
    if named is not None:
        with pytest.raises(UserError, match=rf"by {named}, and .* cannot see .* delete {holder} "):
            RunLock(tmp_path)
        holder.unlink()
    RunLock(tmp_path).release()
    assert not holder.exists()


def test_of_two_hosts_that_start_at_the_same_moment_one_gets_the_run(tmp_path, monkeypatch):
    """Their disk passes no locks on; each thread is a host."""
    met = threading.Barrier(2)
    lock = mock.Mock(acquire=lambda **_: met.wait(60))
    monkeypatch.setattr(sys.modules[RunLock.__module__], "FileLock", lambda *_, **__: lock)
    monkeypatch.setattr(platform, "node", lambda: threading.current_thread().name)

    def gets(run):
        try:
            return bool(RunLock(run))
        except UserError:
            return False

    with ThreadPoolExecutor(2) as hosts:
        for run in map(tmp_path.joinpath, "0123456789"):
            run.mkdir()
            (run / ".lock").touch()
            assert sum(hosts.map(gets, [run, run])) == 1


def test_links_in_a_run_are_refused_but_the_run_itself_may_be_one(tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    for name in (".lock", ".holder", "samples.txt", "loss.png"):
        (run / name).symlink_to(outside)
        with pytest.raises(UserError, match=rf"{run / name} is a symbolic link"):
            RunLock(run)
        (run / name).unlink()
    outside.symlink_to(run)
    RunLock(outside).release()
