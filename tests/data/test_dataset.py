"""Datasets of a run: one or several by weight, ours or another program's."""

import hashlib
import json
import time

import pytest

from fastgpt.config.config import DataConfig
from fastgpt.data.dataset import open_data
from fastgpt.data.order import Mixture
from fastgpt.data.tokenizers import ByteTokenizer
from fastgpt.errors import UserError
from fastgpt.logs.metrics import read_records
from tests.data.sets import prepared, texts, tokenizer_of, write_shard
from tests.runs import before_each, series


@pytest.fixture
def two(tmp_path):
    folder = tmp_path / "lr=0.1"  # of several equals signs, the last one is the weight's
    folder.mkdir()
    a, b = folder / "a.txt", folder / "b.txt"
    a.write_text("the first of two texts. " * 30)
    b.write_text("and here is the second, a longer one. " * 60)
    return a, b


def opened(source, **config):
    return open_data(DataConfig(**config), str(source))


@pytest.mark.parametrize("written", ["{}=0.7,{}=0.1", " {}=7 ,{}=1e-0"])
def test_mixture_is_sources_with_weights_of_which_only_the_ratio_counts(two, written):
    data = opened(written.format(*two))
    assert data.weights == pytest.approx((7 / 8, 1 / 8))
    assert data.name == "0.875 a + 0.125 b"
    assert data.val_bytes_per_token is None
    alone = opened(two[0])
    assert (alone.name, alone.weights, alone.val_bytes_per_token) == ("a", (1.0,), 1.0)
    assert alone.sha256 == hashlib.sha256(two[0].read_bytes()).hexdigest()
    samples = Mixture(data.orders(16, seed=0), data.weights).take(800)
    for number, corpus in enumerate(data.corpora):
        mine = samples[samples[:, 0] == number]
        assert len(mine) == pytest.approx(800 * data.weights[number], abs=5)
        assert len(corpus.train) - 40 < mine[:, 2].max() <= len(corpus.train)


def test_hash_of_a_mixture_is_of_its_texts_their_weights_and_their_order(two):
    a, b = two
    before = [f"{a}=1,{b}=2", f"{a}=2,{b}=4", f"{a}=1,{b}=1", f"{b}=2,{a}=1", str(a)]
    for name in ("sha256", "fingerprint"):
        hashes = [getattr(opened(source), name) for source in before]
        assert hashes[0] == hashes[1]
        assert len(set(hashes)) == 4
    b.write_text("another second text. " * 30)
    assert opened(before[0]).fingerprint != hashes[0]


@pytest.mark.parametrize("part", ["b", "b=0", "b=nan", "b=1e999", "b=half", "=1"])
def test_weight_that_is_none_is_named(part):
    with pytest.raises(UserError, match=f"^--data.source .* above 0; got '{part}'$"):
        opened(f"a=1,{part}")


def test_corpora_of_two_tokenizers_are_not_mixed(two):
    a, b = two
    for second in (b.read_text(), a.read_text().upper()):  # more characters, and others
        b.write_text(second)
        with pytest.raises(UserError, match=r"a \(chars, 12 tokens\) and b .*cannot be mixed"):
            opened(f"{a}=1,{b}=1", tokenizer="chars")


@pytest.fixture
def fineweb(tmp_path):
    folder = tmp_path / "fineweb10B"
    folder.mkdir()
    write_shard(folder / "fineweb_val_000000.bin", range(60, 100))
    write_shard(folder / "fineweb_train_000002.bin", range(100, 200))
    write_shard(folder / "fineweb_train_000001.bin", range(100))
    return folder


def test_folder_of_llmc_shards_is_read_as_it_is(fineweb):
    before = sorted(fineweb.iterdir())
    data = opened(fineweb, tokenizer="bytes", val_fraction=0.5)
    [corpus] = data.corpora
    assert (corpus.name, corpus.tokenizer.kind) == ("fineweb10b", "bytes")
    assert corpus.train[:].tolist() == list(range(200))
    assert corpus.val[:].tolist() == list(range(60, 100))
    assert corpus.val_bytes_per_token is None
    assert sorted(fineweb.iterdir()) == before
    assert opened(fineweb, tokenizer="bytes").sha256 == data.sha256
    write_shard(fineweb / "fineweb_train_000001.bin", range(99, -1, -1))
    assert opened(fineweb, tokenizer="bytes").sha256 != data.sha256
    write_shard(fineweb / "fineweb_train_000002.bin", [1, 2, 256])
    with pytest.raises(UserError, match=r"000002\.bin has the token id 256"):
        opened(fineweb, tokenizer="bytes")
    (fineweb / "fineweb_val_000000.bin").unlink()
    with pytest.raises(UserError, match=r"has no \*val\*\.bin"):
        opened(fineweb)


def test_uint16_shards_without_a_tokenizer_are_gpt2s(fineweb, monkeypatch):
    monkeypatch.setattr("fastgpt.data.corpus.make_tokenizer", lambda kind, _: tokenizer_of(kind))
    write_shard(fineweb / "fineweb_val_000000.bin", [50_256, 15_496, 995] * 3)
    corpus = opened(fineweb).corpora[0]
    assert (corpus.tokenizer.kind, corpus.tokenizer.vocab_size) == ("gpt2", 50_257)
    assert corpus.tokenizer.decode(corpus.val[:3]) == "<|endoftext|>Hello world"
    assert corpus.document_starts("val").tolist() == [0, 3, 6]
    assert corpus.document_starts("train").tolist() == [0]


def test_uint32_shards_need_a_tokenizer(fineweb, tmp_path):
    for path in fineweb.iterdir():
        write_shard(path, range(30), "uint32")
    with pytest.raises(UserError, match=r"32-bit token ids and no tokenizer\.json"):
        opened(fineweb)
    saved = prepared(tmp_path / "other", texts(30)) / "tokenizer.json"
    corpora = [opened(fineweb, tokenizer=str(saved)).corpora[0]]
    (fineweb / "tokenizer.json").write_bytes(saved.read_bytes())
    corpora.append(opened(fineweb).corpora[0])
    for corpus in corpora:
        assert (corpus.tokenizer.kind, corpus.train.dtype) == ("bpe", "uint32")
        assert corpus.train[:].tolist() == [*range(30)] * 2


def test_prepared_tokenizer_must_be_the_one_asked_for(tmp_path):
    out = prepared(tmp_path / "a", texts(30))
    ByteTokenizer().save(tmp_path / "bytes.json")
    for asked in ("auto", "bpe", str(out), str(out / "tokenizer.json")):
        assert opened(out, tokenizer=asked).tokenizer.kind == "bpe"
    for asked in ("bytes", str(tmp_path / "bytes.json")):
        with pytest.raises(UserError, match=r"a was prepared with tokenizer 'bpe', not"):
            opened(out, tokenizer=asked)


def test_run_over_a_mixture_scores_each_corpus_and_goes_on_where_it_was(
    fit, two, tmp_path, capfd, monkeypatch
):
    source = "--optim.schedule constant --data.source {}=0.75,{}=0.25".format(*two)
    with monkeypatch.context() as patch:
        before_each(patch, Mixture, "take", lambda *_: time.sleep(0.3))
        whole = fit(source, f"--run-dir {tmp_path / 'whole'}")
    *_, record = [x for x in read_records(whole / "metrics.jsonl") if "val_loss" in x]
    first, second = record["val_losses"]
    assert first != second
    assert record["val_loss"] == pytest.approx(0.75 * first + 0.25 * second)
    assert record["val_tokens"] == 71 + 227
    assert "val_bits_per_byte" not in record
    manifest = json.loads((whole / "manifest.json").read_text())["data"]
    assert manifest["weights"] == [0.75, 0.25]
    assert manifest["samples_per_epoch"] == [40, 127]
    # 48 of 64 samples, by the rule a few more or less, of 40 an epoch
    assert series(whole, "epoch")[8] == pytest.approx(48 / 40, abs=3 / 40)
    waits = series(whole, "data_wait")
    assert 0.1 < min(waits[7], waits[8]) <= 1  # what was ready before is used up

    cut = fit(source, "--steps 4")
    fit(source, f"--resume {cut} --steps 8 --run-dir {tmp_path / 'on'}")
    assert "other tokens" not in capfd.readouterr().out
    losses = series(whole, "train_loss")
    assert series(tmp_path / "on", "train_loss") == {step: losses[step] for step in (5, 6, 7, 8)}
    fit(source.replace("0.75", "0.5"), "--resume auto --steps 5")
    assert "the data changed since " in capfd.readouterr().out
