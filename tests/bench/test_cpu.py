"""The account of CPU training: phases of a run, and the page made of the records."""

from pathlib import Path

from bench import cpu, report
from fastgpt.device import device

LINES = [
    (2.0, "recipe      baby\n"),
    (2.5, "step      0  epoch 0.00  val loss 4.2\n"),
    (3.0, "step      1/20  loss 4.2\n"),
    (7.0, "step     20/20  loss 1.5\n"),
    (8.0, "step     20  epoch 0.46  val loss 1.8\n"),
    (8.5, "--- sample ---\n"),
    (8.5, "text\n"),
    (9.0, "done after step 20\n"),
]


def test_a_line_ends_the_phase_that_it_reports():
    spent = {"start": 2.0, "training": 4.5, "evaluations": 1.5, "samples": 0.5, "end": 1.5}
    assert cpu.phases(LINES, 10.0) == spent


def test_peers_are_timed_where_they_are_given(monkeypatch):
    monkeypatch.setattr(device, "pick_precision", lambda *_: "bf16")
    asked = cpu.step_bench(cpu.CpuBreakdown(), "shakespeare-cpu")
    assert asked.implementations == ("fastgpt", "fastgpt fp32", "eager")
    here = Path(".")
    breakdown = cpu.CpuBreakdown(nanogpt=here, nanochat=here, llmc=here, compiled=True)
    asked = cpu.step_bench(breakdown, "gpt2-124m")
    assert asked.implementations[3:] == ("compiled", "nanogpt", "nanogpt fp32", "nanochat")
    assert (asked.batch, asked.context, asked.llmc) == ((4,), 64, here)
    assert cpu.step_bench(breakdown, "baby").llmc is None


def test_the_page_is_that_of_the_records():
    written = (report.DOCS / "benchmarks" / "cpu.md").read_text(encoding="utf-8")
    assert written == cpu.text(), "run python -m bench.cpu --publish"
    assert "| shakespeare-cpu |" in written
