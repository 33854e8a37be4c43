"""bench.count without its simulated GPU: the record, its page, and what is refused."""

import json

import pytest

from bench import count
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
    assert count.whole(corners, 12, 256) == {**row(12, 256), "launches": launches}


def test_without_a_simulated_gpu_it_is_one_line(monkeypatch):
    monkeypatch.delenv("SIMGPU", raising=False)
    with pytest.raises(UserError, match="expected build/simgpu/bin/python -m simgpu"):
        count.run(count.CountBench())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch": 0}, "--batch is 0: expected 1 or more"),
        ({"trainers": ()}, "--trainers is empty"),
        ({"add": True, "out": count.HERE / "none.json"}, "there is no record .*none.json"),
        ({"page": count.HERE / "none" / "page.md"}, "there is no folder .*none"),
    ],
)
def test_what_cannot_be_counted_is_refused_at_once(given, said):
    with pytest.raises(UserError, match=said):
        count.CountBench(**given)


def test_other_sizes_are_not_added_to_a_record():
    with pytest.raises(UserError, match=r"--batch is 4: .*counts.json has 16"):
        count.kept(count.CountBench(batch=4))
