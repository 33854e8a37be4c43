"""The page about the architecture matches the code."""

from tests import architecture


def test_the_page_is_current():
    assert architecture.PAGE.read_text(encoding="utf-8") == architecture.page(), (
        "run python -m tests.architecture"
    )


def test_the_core_stays_below_its_ceiling():
    assert {"trainer.py", "loader.py", "fsdp.py"} <= {
        path.name for path in architecture.core_files()
    }
    assert architecture.core_lines() <= architecture.CEILING


def test_imports_of_the_core_are_seen():
    found = architecture.imported("fastgpt/train/trainer")
    assert {
        "fastgpt/train/plan",
        "fastgpt/train/build",
    } <= found
    assert architecture.imported("kernels/attention/forward") == {"kernels/runtime"}
    assert "kernels/attention/forward" in architecture.imported("kernels/attention/backward")
