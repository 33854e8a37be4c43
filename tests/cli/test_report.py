"""The page about runs: what it says, and damaged and hostile runs."""

import json
import re
import shutil

import numpy as np
import pytest

from fastgpt.errors import UserError
from fastgpt.report import __main__ as command
from fastgpt.report.data import SAMPLES, finding, read_run

pytest.importorskip("bokeh", reason="needs the extra report")
HOSTILE = "</script><script>document.title = 'taken'</script>{{ 1 }} \x1b[2J \ud800"


def page_of(*runs):
    out = runs[0].with_name("page.html")
    command.main([*map(str, runs), "-o", str(out)])
    return out.read_text()


def log(run, *records, samples=""):
    lines = [json.dumps(x) if isinstance(x, dict) else x for x in records]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    (run / "samples.txt").write_text(samples, errors="surrogatepass")


def test_figures_come_from_the_log_and_time_from_the_speed(run):
    train = {"train_loss": 2.0, "lr": 0.5, "grad_norm": None, "tok_per_s": 100.0}
    log(run, {"step": 0, "val_loss": 4.0, "tokens": 0}, {"step": 1, "tokens": 200, **train},
        {"step": 3, "tokens": 600, **train}, {"step": 3, "val_loss": 3.0, "tokens": 600},
        {"step": 2, "val_loss": 3.5, "tokens": 400}, {"step": 4, "tokens": 10**400, **train},
        {"step": 4, "tokens": 800, "lr": [1], "train_loss": 1e999},
        {"step": -(10**400), "tokens": 0}, {"step": 7, "tokens": 9, "val_loss": 10**400},
        {"step": 5, "train_loss": "x", "tokens": 1}, '{"step": 6, "tok',
        samples="=== step 9 ===\nlost\n\n=== step 3 ===\nold\n\n=== step 3 ===\nnew\n")  # fmt: skip
    found = read_run(run, "a")
    assert found.notes[-1].startswith("1 of 3 logged training losses are not finite")
    trained, evaluated = found.trained, found.evaluated
    assert trained["step"].tolist() == [1, 3, 4]
    assert trained["minutes"] * 60 == pytest.approx([2, 6, 6])
    assert evaluated["minutes"] * 60 == pytest.approx([0, 4, 6])
    assert trained["lr"][:2].tolist() == [0.5, 0.5]
    assert evaluated["val_loss"].tolist() == [4, 3.5, 3]
    assert np.isnan(trained["grad_norm"]).all()
    assert [(step, said.strip()) for step, said in found.samples] == [(3, "new")]
    assert found.last_step == 4
    page = page_of(run)
    assert "4 of 8 steps" in page
    assert f"--resume {run}</code>" in page


@pytest.mark.parametrize(
    ("losses", "sizes", "said"),
    [
        ([3, 2, 1.5, 2], [9, 9, 9, 9], "has overfitted since step 2"),
        ([3, 2, 1.5, 1.51], [9, 9, 9, 9], "no clear sign"),
        ([3, 2, 1.5, 1.4], [9, 9, 9, 9], "lowest at step 3: 1.4000.* did not rise"),
        ([3, 2, 1.5, 1], [9, 9, 9, 50], "step 2: 1.5000.* not rise.* 50 tokens was 1.0000.* 9"),
        ([3, 2, 9, 8], [50, 50, 9, 9], "2 comparable .* step 1 .* 50 tokens was 2.0000, not .* 9"),
        ([3, 9], [9, 50], "1 comparable evaluation "),
        ([], [], "0 comparable evaluations "),
    ],
)
def test_the_finding_tells_overfitting_from_another_text(run, losses, sizes, said):
    log(run, *({"step": i, "val_loss": float(loss), "val_tokens": size, "tokens": i}
               for i, (loss, size) in enumerate(zip(losses, sizes))))  # fmt: skip
    assert re.search(said, finding(read_run(run, "a")))


def test_the_last_evaluation_counts_by_its_loss_over_the_text_of_the_others(run):
    rows = [{"step": i, "val_loss": 2.0 - i, "val_tokens": 9, "tokens": i} for i in range(3)]
    log(run, *rows, rows[0] | {"step": 3, "val_tokens": 50, "val_loss_compared": 1.0})
    found = read_run(run, "a")
    assert re.search("at step 2: 0.0000; at step 3 it was 1.0000.* 50 tokens", finding(found))
    assert found.best == 2


def test_what_is_missing_is_a_note_and_a_damaged_config_an_error(run):
    assert read_run(run, "a").notes == []
    for lost in ("metrics.jsonl", "samples.txt", "manifest.json"):
        (run / lost).unlink()
    assert len(read_run(run, "a").notes) == 3
    (run / "manifest.json").write_text('{"data": 3, "ops": [1], "resumes": {"a": 1}, "ranks": "x"}')
    assert "<h2>Environment</h2>" in page_of(run)
    (run / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        page_of(run)


def test_a_page_of_two_runs_holds_no_code_of_theirs_and_makes_no_request(run, trained, tmp_path):
    one = run.rename(tmp_path / "one <!--<script>")
    two = tmp_path / "two"
    shutil.copytree(trained, two)
    settings = json.loads((two / "config.json").read_text())
    settings["optim"]["lr"] = 0.125
    (two / "config.json").write_text(json.dumps(settings))
    samples = "".join(f"=== step {i} ===\n{HOSTILE}\n\n" for i in range(50))
    records = [{"step": i, "val_loss": 2.0, "tokens": i, "tok_per_s": 1.0} for i in range(50)]
    log(two, *records, samples=samples)
    page = page_of(one, two)
    assert "<title>one &lt;!--&lt;script&gt; · two</title>" in page
    assert "document.title = 'taken'" not in page
    assert page.count("&lt;/script&gt;&lt;script&gt;document.title") == SAMPLES
    assert "Content-Security-Policy\" content=\"default-src 'none'" in page
    assert re.search(r"<code>--optim.lr</code></td><td>0.004</td><td>0.125", page)
