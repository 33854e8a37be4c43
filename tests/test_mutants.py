"""`python -m tests.mutants` draws, finds and judges mutants as it says."""

import ast
import json
from dataclasses import replace
from pathlib import Path

from tests.mutants import Copy, draw, find, find_in, locate, own_tests, run

ROOT = Path(__file__).parents[1]
ORDER, TESTS = "fastgpt/data/order.py", "tests/test_order.py"
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


def test_a_module_has_its_tests_in_both_layouts(tmp_path):
    own = ["tests/kernels/conformance.py", "tests/kernels/test_norm.py", "tests/test_layer_norm.py"]
    write(tmp_path, dict.fromkeys([*own, "tests/test_aot.py"], ""))
    for path in ("kernels/norm_launch.py", "kernels/norm/device.py"):
        *files, flag, words = own_tests(path, tmp_path)
        assert (sorted(files), flag, words) == (own, "-k", "norm")
    assert own_tests("fastgpt/storage.py", tmp_path) == []


def test_what_catches_a_mutant_is_named_and_so_are_survivors(tmp_path):
    order = "def f(n):\n    return n < 2\n"
    tests = f"from {ORDER[:-3].replace('/', '.')} import f\ndef test_always():\n    assert False\n"
    root = write(
        tmp_path / "tree", {ORDER: order, TESTS: f"{tests}def test_f():\n    assert not f(2)\n"}
    )
    compare, other = find(root)
    gone = replace(other, line="return n < 3")
    copy, results = Copy(root, tmp_path, timeout=60), tmp_path / "results.json"
    copy.environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # most of the time of a run
    assert run([compare, gone], copy, results) == {"caught": 1, "gone": 1}
    caught = json.loads(results.read_text())[compare.id()]
    assert (caught["by"], caught["place"]) == (f"{TESTS}::test_f", f"{ORDER}:2")
    assert copy.left_out == [f"{TESTS}::test_always"]
    assert (root / ORDER).read_text() == (copy.root / ORDER).read_text() == order
    copy.failures = lambda *tests: []  # from here on nothing is caught that was not before
    assert run([compare, other, gone], copy, results) == {"caught": 1, "survived": 1, "gone": 1}


def test_what_the_suite_catches_is_told_from_what_it_does_not(tmp_path):
    root = write(tmp_path / "tree", {ORDER: SOURCE})
    plan = find(root)
    copy = Copy(root, tmp_path, timeout=60)

    def failures(*tests: str) -> list[str]:  # a suite with one test, of one line
        there = "n += max" in (copy.root / ORDER).read_text() or "tests/a::b" in copy.left_out
        return [] if there else ["tests/a::b"]

    copy.failures = failures
    assert run(plan, copy, None) == {"caught": 2, "survived": len(plan) - 2}
