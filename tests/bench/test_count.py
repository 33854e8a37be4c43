"""bench.count without its simulated GPU: the record, its page, and what is refused."""

import json
from dataclasses import replace

import pytest

from bench import count, parts
from fastgpt.config.recipes import RECIPES
from fastgpt.errors import UserError

RECORD = json.loads(count.RECORD.read_text())


def test_the_page_is_that_of_the_record():
    assert count.page(RECORD) == count.PAGE.read_text()


@pytest.mark.parametrize("name", RECORD["trainers"])
def test_the_whole_step_follows_from_what_was_counted(name):
    it = RECORD["trainers"][name]
    corners = {tuple(map(int, at.split(", "))): {"parts": x} for at, x in it["corners"].items()}
    dim = RECIPES[RECORD["recipe"]][1].model.dim
    sizes = (RECORD["layers"], RECORD["batch"], RECORD["context"], dim)
    assert count.predicted(corners, *sizes) == it["parts"]
    assert min(row[key] for row in it["parts"].values() for key in row) >= 0


def test_a_formula_in_both_directions():
    def row(layers, batch):
        return dict.fromkeys(count.FIELDS, 3 + 5 * layers + 7 * batch + 11 * layers * batch)

    corners = {(layers, batch): row(layers, batch) for layers in (2, 4) for batch in (4, 8)}
    launches = row(12, 8)["launches"]  # of the larger number of sequences
    assert count.extrapolated(corners, 12, 256) == {**row(12, 256), "launches": launches}


def test_the_record_has_what_is_claimed_of_our_step():
    trainers = RECORD["trainers"]
    sums = {name: count.total(it["parts"]) for name, it in trainers.items()}
    moved = {name: row["read"] + row["written"] for name, row in sums.items()}
    ours = "fastgpt triton"
    assert moved[ours] <= 0.76 * moved["nanogpt"]
    assert moved[ours] == min(moved.values())
    assert sums[ours]["launches"] <= 0.6 * sums["nanogpt"]["launches"]
    assert (trainers[ours]["waits"], trainers[ours]["allocations"]) == (0, 0)


def config_of_the_record(batch, **model):
    config = RECIPES[RECORD["recipe"]][1]
    sizes = {"vocab_size": RECORD["vocab_size"], "context": RECORD["context"], **model}
    config = replace(config, model=replace(config.model, **sizes))
    tokens = batch * config.model.context
    return replace(config, train=replace(config.train, batch_tokens=tokens))


def test_the_record_foretells_a_step_of_other_sizes():
    ours = "fastgpt triton"
    config = config_of_the_record(RECORD["batch"])
    assert count.recorded(ours, config) == RECORD["trainers"][ours]["parts"]
    deeper = count.recorded(ours, config_of_the_record(RECORD["batch"] // 2, num_layers=24))
    whole = RECORD["trainers"][ours]["parts"]
    assert deeper["attention"]["launches"] == 2 * whole["attention"]["launches"]
    assert deeper["activation"]["written"] == pytest.approx(whole["activation"]["written"], 0.01)
    assert count.recorded(ours, config_of_the_record(4 * RECORD["batch"])) is None  # more chunks
    assert count.recorded("llm.c", config) is None
    assert count.recorded(ours, config_of_the_record(16, dim=1536)) is None
    assert count.recorded(ours, config_of_the_record(16, vocab_size=65)) is None


def test_parts_are_told_beside_their_counts():
    spent = dict.fromkeys(parts.PARTS, 0.0) | {"GEMM": 20.0, "loss": 3.0, "norm": 4.0}
    counts = {part: dict.fromkeys(count.FIELDS, 0) for part in count.PARTS}
    counts["projections"] |= {"flops": 6e12, "read": 2e9, "launches": 144}  # 10 ms, 1 ms
    counts["head and loss"] |= {"flops": 3e12, "read": 8e9, "written": 4e9, "launches": 9}
    counts["norms"] |= {"read": 3e9, "written": 3e9, "launches": 50}
    lines = parts.beside_counts(spent, counts, {"matmul": 600e12, "copy": 2e12})
    assert lines[0] == "products and loss: 23.00 ms, foretold 16.00 (14.00 GB in 153 launches)"
    assert lines[2] == "norms: 4.00 ms, foretold 3.00 (6.00 GB in 50 launches)"
    assert len(lines) == len(parts.GROUPS)
    assert sorted(part for *_, counted in parts.GROUPS for part in counted) == sorted(
        set(count.PARTS) - {"collectives"}
    )


def test_without_a_simulated_gpu_it_is_one_line(monkeypatch):
    monkeypatch.delenv("SIMGPU", raising=False)
    with pytest.raises(UserError, match="expected build/simgpu/bin/python -m simgpu"):
        count.run(count.CountBench())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch": 0}, "--batch is 0: expected 1 or more"),
        ({"trainers": ()}, "--trainers is empty"),
        ({"add": True, "out": count.HERE / "none.json"}, "none.json does not exist"),
        ({"page": count.HERE / "none" / "page.md"}, "none does not exist: expected a folder"),
    ],
)
def test_what_cannot_be_counted_is_refused_at_once(given, said):
    with pytest.raises(UserError, match=said):
        count.CountBench(**given)


def test_other_sizes_are_not_added_to_a_record():
    with pytest.raises(UserError, match=r"--batch is 4: .*counts.json has 16"):
        count.recorded_trainers(count.CountBench(batch=4))
