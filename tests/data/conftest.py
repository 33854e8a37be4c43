import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache of each test's own, empty at first."""
    monkeypatch.setenv("FASTGPT_CACHE", str(tmp_path / "cache"))
