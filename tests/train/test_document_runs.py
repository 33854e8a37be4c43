"""Runs over documents: equal for any ranks and accumulation, and after a resume."""

import pytest

from fastgpt.cli import configure
from fastgpt.errors import UserError
from fastgpt.train.plan import resolve
from tests.data.sets import prepared, texts
from tests.runs import assert_same_up_to_rounding, at_step, outcome, series, terminate

PLAIN = "--optim.kind adamw --data.eval-tokens 0 --eval-every 0 --train.sample-tokens 0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prepares 100 documents of 3 to 63 tokens, mostly cut or padded at a context of 32."""
    return prepared(tmp_path_factory.mktemp("documents") / "short", texts(100, longest=16))


@pytest.fixture
def documents(folder):
    """Returns the flags of a run on the short documents, four of which make a step."""
    return f"--data.source {folder} --model.context 32 --data.align document"


def test_documents_have_the_tokenizer_of_the_recipe(tiny, monkeypatch):
    def open_data(*_, documents):
        raise UserError(documents)

    monkeypatch.setattr("fastgpt.train.data.open_data", open_data)
    for flags in ("--model.vocab-size 50257", "--data.align document", "--model.document-mask"):
        with pytest.raises(UserError, match="gpt2"):
            resolve(configure(tiny(flags)))
    with pytest.raises(UserError, match="bytes"):
        resolve(configure(tiny("--model.vocab-size 50256")))
    monkeypatch.undo()
    with pytest.raises(UserError, match="bytes tokenizer has no end-of-text token"):
        resolve(configure(tiny("--data.align bos --data.tokenizer bytes")))


def test_accumulation_and_ranks_change_nothing_though_documents_differ_in_length(
    fit, tiny, documents, tmp_path, ranks
):
    """Means of micro-batches with unlike numbers of targets would differ in the second digit."""
    flags = f"{documents} {PLAIN} --steps 4"
    whole = fit(flags, f"--train.micro-batch 4 --run-dir {tmp_path / 'whole'}")
    for size in (3, 1):  # 3 does not divide 4: 2 is taken
        split = fit(flags, f"--train.micro-batch {size} --run-dir {tmp_path / str(size)}")
        assert_same_up_to_rounding(split, whole)
    ranks.train(tiny(flags, f"--train.micro-batch 1 --run-dir {tmp_path / 'two'}"))
    assert_same_up_to_rounding(tmp_path / "two", whole)


@pytest.mark.parametrize("align", ["bos --model.document-mask", "document"])
def test_resumed_run_equals_the_unbroken_one(fit, documents, tmp_path, monkeypatch, align):
    flags = f"{documents} --data.align {align} --steps 12 --model.dropout 0.2"
    flags += " --train.micro-batch 2"
    whole = fit(flags, f"--run-dir {tmp_path / 'whole'}")
    at_step(monkeypatch, 7, terminate)
    run = fit(flags)
    assert max(series(run, "train_loss")) == 7
    fit(flags, "--resume auto")
    assert outcome(run) == outcome(whole)
    with pytest.raises(UserError, match=r"data\.align is none: expected"):
        fit(documents, "--data.align none --resume auto")


def test_mask_and_alignment_reach_the_model_and_the_data(fit, documents, tmp_path):
    """The document mask and the alignment each change the loss after a step."""
    losses = set()
    for number, align in enumerate(("none", "bos", "document", "none --model.document-mask")):
        flags = f"--data.align {align} --steps 2 --run-dir {tmp_path / str(number)}"
        losses.add(series(fit(documents, PLAIN, flags), "train_loss")[2])
    assert len(losses) == 4
