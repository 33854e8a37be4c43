import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTGPT_CACHE", str(tmp_path / "cache"))
