"""The page about runs: what it says, damaged and hostile runs, and the page in a real browser."""

import json
import re
import shutil

import numpy as np
import pytest

from fastgpt.errors import UserError, run_command
from fastgpt.report import __main__ as command
from fastgpt.report.data import SAMPLES, finding, read_run
from tests.processes import ended
from tests.runs import one_line_error

pytest.importorskip("bokeh", reason="needs the extra report")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "</script><script>document.title = 'taken'</script>{{ 1 }} \x1b[2J \ud800"


def page_of(*runs, flags=()):
    out = runs[0].with_name("page.html")
    command.main([*map(str, runs), "-o", str(out), *flags])
    return out.read_text()


def log(run, *records, samples=""):
    lines = [json.dumps(x) if isinstance(x, dict) else x for x in records]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    (run / "samples.txt").write_text(samples, errors="surrogatepass")


def test_figures_come_from_the_log_and_time_from_the_speed(fit):
    run = fit()
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
        (
            [3, 2, 1.5, 1],
            [9, 9, 9, 50],
            "lowest at step 2: 1.5000.* did not rise.* over 50 tokens was 1.0000, not .* 9",
        ),
        ([3, 2, 9, 8], [50, 50, 9, 9], "2 comparable .* step 1 .* 50 tokens was 2.0000, not .* 9"),
        ([3, 9], [9, 50], "1 comparable evaluation "),
        ([], [], "0 comparable evaluations "),
    ],
)
def test_the_finding_tells_overfitting_from_another_text(fit, losses, sizes, said):
    run = fit("--steps 1")
    log(run, *({"step": i, "val_loss": float(loss), "val_tokens": size, "tokens": i}
               for i, (loss, size) in enumerate(zip(losses, sizes))))  # fmt: skip
    assert re.search(said, finding(read_run(run, "a")))


def test_the_last_evaluation_counts_by_its_loss_over_the_text_of_the_others(fit):
    run = fit("--steps 1")
    rows = [{"step": i, "val_loss": 2.0 - i, "val_tokens": 9, "tokens": i} for i in range(3)]
    log(run, *rows, rows[0] | {"step": 3, "val_tokens": 50, "val_loss_compared": 1.0})
    found = read_run(run, "a")
    assert re.search(
        r"lowest at step 2: 0.0000; at step 3 it was 1.0000.* 50 tokens", finding(found)
    )
    assert found.best == 2


@pytest.mark.parametrize("lost", ["metrics.jsonl", "samples.txt", "manifest.json"])
def test_what_is_missing_is_a_note(fit, lost):
    run = fit()
    for path in run.glob(lost):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = page_of(run)
    said = {
        "metrics.jsonl": "logged 0 of 8 steps",
        "samples.txt": "There are no samples",
        "manifest.json": "the machine is unknown",
    }
    assert [note for note in said.values() if note in page][:1] == [said[lost]]
    (run / "manifest.json").write_text('{"data": 3, "ops": [1], "resumes": {"a": 1}, "ranks": "x"}')
    assert "<h2>Environment</h2>" in page_of(run)


def test_bad_arguments_are_errors_of_one_line(fit, tmp_path, capfd, monkeypatch):
    run = fit("--steps 1")
    for arguments, said in [
        ([str(tmp_path / "none")], "none does not exist: expected the folder of a run"),
        ([str(tmp_path)], "is not a run"),
        ([], "no RUN was given"),
        ([str(run), "-o", str(tmp_path)], "expected a file in a folder that exists"),
        ([str(run), "-o", str(tmp_path / "no" / "page.html")], "expected a file in a folder"),
    ]:
        monkeypatch.setattr("sys.argv", ["report", *arguments])
        assert said in one_line_error(capfd, run_command, command.main)
    (run / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        page_of(run)


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_browser_draws_two_runs_without_an_error_or_a_request(fit, tmp_path):
    one = fit().rename(tmp_path / "one <!--<script>")
    two = fit("--optim.lr 1e-3")
    samples = "".join(f"=== step {i} ===\n{HOSTILE}\n\n" for i in range(50))
    records = [{"step": i, "val_loss": 2.0, "tokens": i, "tok_per_s": 1.0} for i in range(50)]
    log(two, *records, samples=samples)
    page_of(one, two)
    done = ended(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom",
                 "--enable-logging=stderr", "--virtual-time-budget=20000", "--window-size=900,900",
                 f"--user-data-dir={tmp_path}/profile", f"file://{tmp_path}/page.html")  # fmt: skip
    dom, console = done.stdout, [x for x in done.stderr.splitlines() if "CONSOLE" in x]
    assert not [line for line in console if "[bokeh" not in line]
    assert "document idle" in console[-1]  # Bokeh has drawn all figures
    assert "<title>one &lt;!--&lt;script&gt; · run</title>" in dom
    assert "--optim.lr" in dom
    assert dom.count("<tr><td><code>") >= 2 * 10  # hardest places
    assert dom.count(' log" hidden') == dom.count(' log"') > 3  # the scale that is not chosen
    assert dom.count("<figure hidden") == (2 - 1) + (SAMPLES - 1)  # one sample of each run is shown
    assert "Content-Security-Policy\" content=\"default-src 'none'" in dom  # no request can be made
