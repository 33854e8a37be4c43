import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Gives each test a cache of its own, empty at first."""
    monkeypatch.setenv("FASTGPT_CACHE", str(tmp_path / "cache"))
