"""`python -m tests.mutants` draws, finds and judges mutants as documented."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants import Copy, draw, find, find_in, judge, locate, own_tests

ROOT = Path(__file__).parents[1]
ORDER, TESTS = "fastgpt/data/order.py", "tests/data/test_order.py"
SOURCE = '''
class Order:
    def rows(self, n: int = 1):
        """1 < 2."""
        if not é < n:
            raise ValueError(f"{n + 1} < 2")
        n += max(n // 8_192, 0.0)
        self.read()
        self.read()
'''
CHANGED = """def rows(self, n: int = 2):
if not é <= n:
if é < n:
n += max(n * 8_192, 0.0)
n += max(n // 8193, 0.0)
n += max(n // 8_192, 1.0)
n += min(n // 8_192, 0.0)
pass
pass
pass"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_code_is_changed_and_no_message_annotation_or_docstring():
    found = list(find_in(SOURCE, ORDER))
    assert sorted(m.mutated for m in found) == sorted(CHANGED.split("\n"))
    assert {m.function for m in found} == {"Order.rows"}
    assert [m.occurrence for m in found[-2:]] == [0, 1]


def test_a_draw_is_even_and_the_same_again_and_changes_one_line_each():
    plan = draw(ROOT, seed=0, count=40)
    assert plan == draw(ROOT, seed=0, count=40) != draw(ROOT, seed=1, count=40)
    groups = ("device", "launchers", "data", "checkpoint", "engine")
    assert [m.group for m in plan] == [group for group in groups for _ in range(8)]
    for mutant in plan:
        before = (ROOT / mutant.path).read_text()
        ast.parse(after := mutant.apply(before))
        changed = [a for a, b in zip(before.split("\n"), after.split("\n"), strict=True) if a != b]
        assert [line.strip() for line in changed] == [mutant.line]


def test_a_change_is_found_in_the_file_that_its_function_moved_to():
    *_, drawn = find_in(SOURCE, "kernels/norm_launch.py")
    paths = ("kernels/rotary/device.py", "kernels/norm/device.py", ORDER)
    moved = [m for path in paths for m in find_in("\n" + SOURCE, path)]
    assert locate(drawn, moved) == replace(drawn, path=paths[1], row=drawn.row + 1)
    assert locate(drawn, list(find_in(SOURCE.replace("read", "write"), paths[1]))) is None


def test_a_modules_tests_lie_in_the_folder_of_its_name():
    assert own_tests("kernels/norm/device.py") == ["tests/kernels", "-k", "norm"]
    assert own_tests(ORDER) + own_tests("fastgpt/files.py") == ["tests/data", "tests/train"]
    assert all((ROOT / own_tests(mutant.path)[0]).is_dir() for mutant in find(ROOT))


def test_a_verdict_names_the_test_that_catches_the_mutant(tmp_path):
    order = "def f(n):\n    return n < 2\n"
    test = f"from {ORDER[:-3].replace('/', '.')} import f\ndef test_f():\n    assert not f(2)\n"
    root = write(tmp_path / "tree", {ORDER: order, TESTS: test})
    copy = Copy(root, tmp_path, timeout=60)
    copy.environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # most of the time of a run
    compare, number = find(root)
    caught = judge(compare, compare, copy)
    assert (caught["verdict"], caught["by"]) == ("caught", f"{TESTS}::test_f")
    assert caught["place"] == f"{ORDER}:2"
    assert judge(number, None, copy)["verdict"] == "gone"
    assert (root / ORDER).read_text() == (copy.root / ORDER).read_text() == order


def test_the_whole_suite_meets_what_a_modules_tests_let_through(tmp_path, monkeypatch):
    root = write(tmp_path / "tree", {ORDER: SOURCE, TESTS: ""})
    update, *_, call = find(root)
    copy = Copy(root, tmp_path, timeout=60)
    left_alone = "def rows(self, n: int = 1)"

    def failure(*tests: str) -> str | None:  # of a suite that catches one mutant
        return (
            None
            if tests[0] == "tests/data" or left_alone in (copy.root / ORDER).read_text()
            else "status"
        )

    monkeypatch.setattr(copy, "failure", failure)
    assert [judge(m, m, copy)["verdict"] for m in (update, call)] == ["caught", "survived"]


def test_a_test_that_fails_without_the_mutant_ends_the_run(tmp_path, monkeypatch):
    copy = Copy(write(tmp_path / "tree", {ORDER: SOURCE, TESTS: ""}), tmp_path, timeout=60)
    monkeypatch.setattr(copy, "failure", lambda *tests: f"{TESTS}::test_f")
    mutant = find(copy.root)[0]
    with pytest.raises(SystemExit, match="test_f fails without a mutant, too"):
        judge(mutant, mutant, copy)
