import sys
from unittest import mock

import pytest

from fastgpt.data import reading
from fastgpt.data.preparation import open_corpus
from fastgpt.data.reading import read_chunks
from fastgpt.data.sources import find_source
from fastgpt.errors import UserError
from tests.data.sets import write_documents


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTGPT_DATA", str(tmp_path / "mine"))
    reading.load_splits.cache_clear()
    yield
    reading.load_splits.cache_clear()


@pytest.fixture
def load(datasets, monkeypatch):
    """Replaces the network by columns of made-up splits; returns the requests."""

    def serve(size=None, **splits):
        asked = []
        found = {name: datasets.Dataset.from_dict(columns) for name, columns in splits.items()}

        def load_dataset(streaming, **kwargs):
            asked.append((kwargs["path"], kwargs["name"], kwargs["revision"]))
            if streaming:
                return {name: rows.to_iterable_dataset() for name, rows in found.items()}
            return found

        about = mock.Mock(info=mock.Mock(size_in_bytes=size))
        monkeypatch.setattr(datasets, "load_dataset_builder", lambda **_: about)
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return asked

    return serve


def texts(source):
    return [chunk.text for chunk in read_chunks(source)]


@pytest.mark.parametrize(
    ("name", "asked", "short"),
    [
        ("hf:some-one/My.Set", ("some-one/My.Set", None, None), "my"),
        ("hf:one/set/en-10BT", ("one/set", "en-10BT", None), "set-en-10bt"),
        ("hf:one/set@refs/convert/parquet", ("one/set", None, "refs/convert/parquet"), "set"),
        ("fineweb-edu", ("HuggingFaceFW/fineweb-edu", "sample-10BT", None), "fineweb-edu"),
    ],
)
def test_name_gives_repository_configuration_and_revision(load, name, asked, short):
    calls = load(train={"text": ["one"]})
    source = find_source(name)
    assert texts(source) == ["one"]
    assert calls == [asked]  # once: it is not loaded again to be read
    assert (source.name, source.split, source.plain) == (short, "hash", False)


def test_rows_without_text_are_passed_over_also_in_a_stream(load, monkeypatch):
    monkeypatch.setattr(reading, "BATCH_ROWS", 2)
    for size in (None, 2**60):  # which no disk has
        load(size=size, train={"id": [1, 2, 3, 4, 5], "content": ["a", None, "c", "", "e"]})
        assert texts(find_source("hf:one/set", field="content")) == ["a", "c", "e"]
        reading.load_splits.cache_clear()


def test_a_whole_preparation_reads_the_hub(load):
    load(train={"text": [f"document {i}" for i in range(50)]})
    corpus = open_corpus("hf:one/set", tokenizer="bytes", val_fraction=0.3)
    assert corpus.manifest["splits"]["train"]["documents"] > 20


@pytest.mark.parametrize("validation", ["validation", "valid", "val"])
def test_published_validation_split_is_kept(load, validation):
    load(**{"test": {"text": ["t"]}, validation: {"text": ["v"]}, "train": {"text": ["a", "b"]}})
    source = find_source("tinystories")
    assert source.split == "named"
    assert [file.split for file in source.files] == ["train", "val"]
    assert texts(source) == ["a", "b", "v"]


@pytest.mark.parametrize("field", ["content", "id"])
def test_column_without_text_is_named(load, field, tmp_path):
    load(train={"id": [1], "text": ["a"]})
    path = str(write_documents(tmp_path / "x.parquet", ["a"]))
    for source in ("hf:one/set", path):
        with pytest.raises(UserError, match=f"{source} has no column '{field}' .*: id .*, text"):
            texts(find_source(source, field=field))


def test_wrong_name_or_set_without_training_split_is_named(load):
    asked = load(test={"text": ["a"]}, dev={"text": ["b"]})
    for name in ("hf:", "hf:set", "hf:one/set/en/more", "hf:one/set@"):
        with pytest.raises(UserError, match="expected hf:owner/name"):
            find_source(name)
    assert asked == []
    with pytest.raises(UserError, match="has the splits test, dev: expected train"):
        find_source("hf:one/set")


def test_without_network_or_package_it_says_where_to_put_the_files(datasets, monkeypatch, tmp_path):
    error = ConnectionError("Couldn't reach\nthe hub")
    monkeypatch.setattr(datasets, "load_dataset_builder", mock.Mock(side_effect=error))
    place = f"put them into {tmp_path / 'mine' / 'fineweb'} "
    with pytest.raises(UserError, match=rf"^[^\n]+\(Couldn't reach the hub\)[^\n]+{place}"):
        find_source("fineweb")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=f"needs the package datasets.*{place}"):
        find_source("fineweb")
