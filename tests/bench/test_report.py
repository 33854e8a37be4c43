"""The report: every figure from a record, goals kept and missed, one run at a time."""

import json

import pytest

from bench import goals, records, report, tables
from bench.cases import cases
from bench.goals import Goal, check_goal, seconds
from fastgpt.errors import UserError

DEVICE = "NVIDIA H200"
PEAKS = {"matmul": 790e12, "copy": 4.3e12}
COMMON = {
    "device": DEVICE, "on": "cuda", "driver": "580.1", "versions": {"torch": "2.11.0"},
    "commit": "abc", "dirty": False, "settings": {},
}  # fmt: skip


def op_row(implementation, p50, *, run="r1", which="fwd", case="attention/gpt2-124m/bf16", **own):
    spread = {"p20": 0.9 * p50, "p50": p50, "p80": 1.1 * p50, "samples": 9}
    flops, size = 25_769_803_776.0, 101_449_728.0
    return {
        "kind": "op", "run": run, **COMMON, "case": case, "op": case.split("/")[0],
        "shape": {}, "dtype": "bf16", "pass": which, "implementation": implementation,
        "device_s": spread, "host_s": {**spread, "p50": 3e-5}, "flops": flops, "bytes": size,
        "tflops": flops / p50 / 1e12, "gb_per_s": size / p50 / 1e9, "bound": "matmul",
        "limit_s": flops / 790e12, "share": flops / 790e12 / p50, "roof": PEAKS,
        "peak_bytes": 26_000_000, **own,
    }  # fmt: skip


def step_row(implementation, p50, tok_per_s, peak_bytes, **own):
    spread = {"p20": 0.9 * p50, "p50": p50, "p80": 1.1 * p50, "samples": 9}
    return {
        "kind": "step", "run": "r1", **COMMON, "case": "step/gpt2-124m/B=64", "precision": "bf16",
        "implementation": implementation, "seconds": spread, "tok_per_s": tok_per_s, "mfu": 0.5,
        "mfu_convention": "6N", "peak_bytes": peak_bytes, "dropout": 0.0, **own,
    }  # fmt: skip


def written(tmp_path, *rows, name="2026-01-01-abc.jsonl"):
    path = tmp_path / "results" / "nvidia-h200" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "results"


def text_of(tmp_path, *rows, **name):
    return text_in(report.write(written(tmp_path, *rows, **name), tmp_path / "docs"))


def text_in(page):
    """Returns the text of the page and of the ops' pages."""
    return "".join(path.read_text() for path in (page, *page.parent.glob("benchmarks/*.md")))


def line_of(text, *parts):
    """Returns the one line of the tables that contains all parts."""
    (line,) = [x for x in text.splitlines() if x.startswith("|") and all(p in x for p in parts)]
    return line


def test_rows_have_ratios_goals_also_missed_ones_and_a_link_to_their_record(tmp_path):
    rows = [op_row("ours", 0.12e-3), op_row("sdpa-flash", 0.15e-3), op_row("sdpa-cudnn", 0.108e-3)]
    text = text_of(tmp_path, *rows)
    ours = line_of(text, "gpt2-124m/bf16 | ours")
    assert "| 0.12 (0.108, 0.132) |  |  |" in ours
    assert "215 TFLOP/s" in ours
    assert "27% matmul" in ours
    assert "fwd at least 1.15 x sdpa-flash's speed: +9%" in ours
    assert "at least 0.95 x sdpa-cudnn's speed: -5%" in ours
    assert "at least 1.1 x flex's speed: flex cannot run here" in ours
    assert "[record](../../results/nvidia-h200/2026-01-01-abc.jsonl)" in ours
    assert "**0.90x** |" in line_of(text, "gpt2-124m/bf16 | sdpa-cudnn")
    assert " 1.25x |" in line_of(text, "gpt2-124m/bf16 | sdpa-flash")
    assert "-5% | **no** |" in line_of(text, "fwd | at least 0.95 x sdpa-cudnn")
    assert "flex cannot run here" in line_of(text, "gpt2-124m/bf16 fwd | at least 1.1 x flex")
    assert "not measured" in line_of(text, "| step/", "580,000 tokens/s")


def test_steps_are_judged_by_the_faster_of_ours(tmp_path):
    rows = [
        step_row("fastgpt", 0.13, 504_000, 60e9),
        step_row("fastgpt triton", 0.11, 595_000, 30e9),
        step_row("nanogpt", 0.165, 397_000, 60e9, first_step_s=31.0, first_step_alone=False),
    ]
    text = text_of(tmp_path, *rows)
    assert "| 595,000 | +3% | yes |" in line_of(text, "| step/", "at least 580,000 tokens/s")
    assert "| 1.5 | +15% | yes |" in line_of(text, "| step/", "at least 1.3 x nanogpt's speed")
    assert "| 0.5 | +20% | yes |" in line_of(text, "| step/", "at most 0.6 of nanogpt's memory")
    assert "cannot run here" in line_of(text, "step/gpt2-124m/B=64 | at least 1.15 x llm.c")
    assert "| 1.50 | 60 | 31.0, all at once |" in line_of(text, "| **nanogpt** | bf16")


def test_only_the_newest_run_of_a_case_is_compared(tmp_path):
    old = [op_row("ours", 1.0, run="a"), op_row("flex", 1e-9, run="a")]
    new = [op_row("ours", 0.12e-3, run="b"), op_row("sdpa-flash", 0.15e-3, run="b")]
    text = text_of(tmp_path, *new, *old)
    assert "| 0.15 (" in line_of(text, "bf16 | sdpa-flash")
    assert "| flex |" not in text


def test_a_gpu_with_records_of_its_tuning_alone_has_no_goals_of_a_cpu(tmp_path):
    row = {"kind": "tune", "run": "r1", **COMMON, "case": "D=64 bfloat16"}
    text = text_of(tmp_path, row, name="2026-01-01-tune.jsonl")
    assert "Records of `make tune`: [2026-01-01-tune.jsonl]" in text
    assert "not measured" in line_of(text, "| step/", "580,000 tokens/s")
    assert "/fp32" not in text


def absent(kind, implementation, reason):
    about = {"run": "r1", **COMMON, "case": "attention/gpt2-124m/bf16", "op": "attention"}
    return {**about, "kind": kind, "implementation": implementation, "reason": reason}


def test_who_has_no_figures_is_listed_with_the_reason(tmp_path):
    missing = absent("missing", "flash-attn-3", "not there")
    refused = absent("refused", "liger", "wrong: output 0")
    text = text_of(tmp_path, op_row("ours", 1e-3), missing, refused)
    assert "| attention | flash-attn-3 | missing | not there |" in text
    assert "| attention | liger | refused | wrong: output 0 |" in text


def test_the_same_records_give_the_same_files(tmp_path):
    rows = [op_row("ours", 0.12e-3), op_row("eager", 0.5e-3), step_row("fastgpt", 0.1, 1e5, 1e9)]
    results = written(tmp_path, *rows)
    files = []
    for name in ("a", "b"):
        report.write(results, tmp_path / name)
        files.append({path.name: path.read_bytes() for path in (tmp_path / name).glob("**/*.*")})
    assert files[0] == files[1]
    plots = [f"nvidia-h200-{plot}.png" for plot in ("roofline", "step")]
    assert sorted(files[0]) == ["benchmarks.md", *plots, "nvidia-h200.md"]


def test_the_newest_records_of_races_texts_and_data_are_shown(tmp_path):
    race = {"kind": "race", **COMMON, "val_loss": [1.9], "nanogpt_over_it": [1.0]}
    rows = [
        {**race, "run": "r1", "run_name": "nanogpt", "seconds": [82.0]},
        {**race, "run": "r2", "run_name": "nanogpt", "seconds": [74.0]},
        {"kind": "generate", "run": "r1", **COMMON, "case": "generate/gpt2-124m/2 prompts",
         "implementation": "fastgpt", "prompts": [4, 8], "tokens": 10,
         "seconds": {"p20": 1.0, "p50": 2.0, "p80": 3.0}},
        {"kind": "data", "run": "r1", **COMMON, "case": "loader (64, 1024)", "p50": 120.0},
    ]  # fmt: skip
    text = text_of(tmp_path, *rows)
    assert "| nanogpt | 74.0 | 1.9000 | 1.00 |" in text
    assert "| 82.0 |" not in text
    assert "| generate/gpt2-124m/2 prompts | fastgpt | 1.00 2.00 3.00 | 100.0 |" in text
    assert "| loader (64, 1024) | 120 million tokens/s |" in text


def test_the_records_of_the_repository_are_read(tmp_path):
    assert "no records yet" in report.write(tmp_path / "empty", tmp_path).read_text()
    text = report.write(records.RESULTS, tmp_path).read_text()
    shown = {f"## {row['device']}" for row in records.read() if row["kind"] in report.SHOWN}
    assert shown == {line for line in text.splitlines() if line.startswith("## A")}


def test_the_page_begins_with_ours_beside_the_best_peer(tmp_path):
    rows = [op_row("ours", 2e-3), op_row("eager", 3e-3), op_row("flex", 2.5e-3)]
    rows += [op_row("ours", 1e-3, which="both"), op_row("eager", 1.5e-3, which="both")]
    rows += [step_row("fastgpt", 0.1, 1e5, 1e9), step_row("nanogpt", 0.2, 5e4, 1e9)]
    page = report.write(written(tmp_path, *rows), tmp_path / "docs").read_text()
    first, second = [x for x in page.splitlines() if x.startswith("|")][2:4]
    assert first == "| step/gpt2-124m/B=64 | 100 | nanogpt | 200 | 2.00x | 50% (MFU) |"
    assert second.startswith("| attention/gpt2-124m/bf16 both | 1 | eager | 1.5 | 1.50x | ")
    assert "(above 1x) in 2 of 2 rows, as fast in 0, and slower (below 1x) in 0." in page


def test_numbers_have_three_digits_and_no_exponent():
    shown = [tables.three_digits(x) for x in (0.0844, 36.24, 999.6, 1039.7, 595_000)]
    assert shown == ["0.0844", "36.2", "1,000", "1,040", "595,000"]


# --- local and published --------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Makes a folder with committed records and one for documents."""
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "DOCS", tmp_path / "docs")
    written(tmp_path, op_row("ours", 0.2e-3, run="r0"))
    return tmp_path


def add_run(checkout, *rows):
    local = written(checkout / "local", *rows)
    return local.rename(checkout / "results" / "local")


def test_local_records_have_a_page_of_their_own(checkout, capsys):
    local = add_run(checkout, op_row("ours", 0.1e-3))
    report.main([])
    text = text_in(local / "benchmarks.md")
    assert "| 0.1 (" in line_of(text, "bf16 | ours")
    assert "(../nvidia-h200/2026-01-01-abc.jsonl)" in text
    assert capsys.readouterr().out == f"{local}/benchmarks.md\n"
    assert not (checkout / "docs").exists()
    assert [row["run"] for row in records.read()] == ["r0"]


def test_publishing_moves_them_beside_the_committed_ones(checkout):
    local = add_run(checkout, op_row("ours", 0.1e-3))
    report.main(["--publish"])
    text = text_in(checkout / "docs" / "benchmarks.md")
    assert "| 0.1 (" in line_of(text, "bf16 | ours")
    assert "(../../results/nvidia-h200/2026-01-01-abc.jsonl)" in text
    assert [row["run"] for row in records.read()] == ["r0", "r1"]
    assert records.read(local) == []


def test_what_was_refused_is_not_published(checkout):
    local = add_run(checkout, absent("refused", "ours", "wrong"))
    with pytest.raises(UserError, match="is not published: attention/gpt2-124m/bf16: wrong"):
        report.main(["--publish"])
    assert len(records.read()) == len(records.read(local)) == 1
    assert not (checkout / "docs").exists()


# --- goals ----------------------------------------------------------------------------------------


def test_every_goal_names_a_case_that_is_measured():
    known = {case.name for on in ("cuda", "cpu") for case in cases(on, full=True)}
    known = {f"{case.rpartition('/')[0]}/{dtype}" for case in known for dtype in ("bf16", "fp32")}
    assert {goal.case for goal in goals.read() if not goal.case.startswith("step/")} <= known


@pytest.mark.parametrize(
    ("kind", "wanted", "value", "distance"),
    [
        ("ms", 0.10, 0.12, 0.10 / 0.12 - 1),
        ("host_us", 25, 30, 25 / 30 - 1),
        ("gb", 0.052, 0.026, 1.0),
        ("share", 0.10, 101_449_728 / 0.12e-3 / 4.3e12, None),
    ],
)
def test_each_kind_of_goal(kind, wanted, value, distance):
    row = op_row("ours", 0.12e-3)
    result = check_goal(Goal(row["case"], "fwd", "h200", "", kind, wanted, None), [row])
    assert result.value == pytest.approx(value)
    assert result.distance == pytest.approx(value / wanted - 1 if distance is None else distance)
    assert seconds(row) == 0.12e-3


def test_a_goal_of_two_kinds_is_refused(tmp_path):
    path = tmp_path / "goals.toml"
    path.write_text('[[goal]]\ncase = "a"\nms = 1\nshare = 0.5\n')
    with pytest.raises(ValueError, match="expected one kind"):
        goals.read(path)
