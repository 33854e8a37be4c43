import sys
from unittest import mock

import pytest

from fastgpt.data import reading
from fastgpt.data.preparation import open_corpus
from fastgpt.data.reading import read_chunks
from fastgpt.data.sources import find_source
from fastgpt.errors import UserError
from tests.data.sets import write_documents


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTGPT_DATA", str(tmp_path / "mine"))
    reading.load_splits.cache_clear()
    yield
    reading.load_splits.cache_clear()


@pytest.fixture
def load(monkeypatch):
    """Replaces the network by columns of made-up splits; returns the requests."""
    import datasets

    def serve(size=None, **splits):
        asked = []
        found = datasets.DatasetDict(
            {name: datasets.Dataset.from_dict(columns) for name, columns in splits.items()}
        )

        def load_dataset(streaming, **kwargs):
            asked.append((kwargs["path"], kwargs["name"], kwargs["revision"]))
            if streaming:
                return {name: rows.to_iterable_dataset() for name, rows in found.items()}
            return found

        about = mock.Mock(info=mock.Mock(size_in_bytes=size))
        monkeypatch.setattr(datasets, "load_dataset_builder", lambda **_: about)
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return found, asked

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
        ("openwebtext", ("Skylion007/openwebtext", None, None), "openwebtext"),
    ],
)
def test_name_gives_repository_configuration_and_revision(load, name, asked, short):
    _, calls = load(train={"text": ["one"]})
    source = find_source(name)
    assert texts(source) == ["one"]
    assert calls == [asked]  # once: it is not loaded again to be read
    assert (source.name, source.split, source.plain) == (short, "hash", False)


def test_rows_without_text_are_passed_over(load, monkeypatch):
    monkeypatch.setattr(reading, "BATCH_ROWS", 2)
    load(train={"id": [1, 2, 3, 4, 5], "content": ["a", None, "c", "", "e"]})
    source = find_source("hf:one/set", field="content")
    assert texts(source) == ["a", "c", "e"]


def test_set_that_does_not_fit_on_the_disk_is_streamed(load):
    load(size=2**60, train={"id": [1, 2, 3], "text": ["a", None, "c"]}, val={"text": ["v"]})
    assert texts(find_source("hf:one/set")) == ["a", "c", "v"]


def test_a_whole_preparation_reads_the_hub(load, tmp_path):
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
        said = rf"{source} has no column '{field}' of text: .*--field .columns: id .*, text"
        with pytest.raises(UserError, match=said):
            texts(find_source(source, field=field))


def test_set_without_a_training_split_is_named(load):
    load(test={"text": ["a"]}, dev={"text": ["b"]})
    with pytest.raises(UserError, match="hf:one/set has the splits test, dev: expected train"):
        find_source("hf:one/set")


def test_no_network_or_package_says_what_to_install_and_what_to_put_where(monkeypatch, tmp_path):
    import datasets

    error = ConnectionError("Couldn't reach the hub\nhere is more than one wants to know")
    monkeypatch.setattr(datasets, "load_dataset_builder", mock.Mock(side_effect=error))
    with pytest.raises(UserError, match=r"^[^\n]+$") as raised:
        find_source("fineweb")
    said = str(raised.value)
    assert "cannot load hf:HuggingFaceFW/fineweb/sample-10BT" in said
    assert "(Couldn't reach the hub here is more than one wants to know); or get its files" in said
    assert f"put them into {tmp_path / 'mine' / 'fineweb'} and use that folder" in said
    monkeypatch.setitem(sys.modules, "datasets", None)
    said = r"needs the package datasets: make setup EXTRAS=data.*put them into .*mine/fineweb"
    with pytest.raises(UserError, match=said):
        find_source("fineweb")


@pytest.mark.parametrize("name", ["hf:", "hf:set", "hf:one/set/en/more", "hf:one/set@"])
def test_name_that_is_none_is_refused(load, name):
    _, asked = load(train={"text": ["a"]})
    with pytest.raises(UserError, match=r"expected hf:owner/name\[/configuration\]\[@revision\]"):
        find_source(name)
    assert asked == []
