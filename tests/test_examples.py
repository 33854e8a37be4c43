"""Each script of examples/ runs, with a text and settings that take a moment."""

import json
import re

import pytest

from tests.processes import ROOT
from tests.warm import warm

pytestmark = [pytest.mark.slow, pytest.mark.every_change]

# Arguments, and what the last line of the output must be. They run in this order, in one folder.
EXAMPLES = {
    "train_your_text.py": ("mybook.txt --steps 2 --out run", "The "),
    "own_dataset.py": ("--steps 2 --out sums", r"\d+ of 1000 answers are right"),
    "own_kernel.py": ("", r"loss \d\.\d+, of a model with <function gelu at \w+>"),
    "fine_tune.py": ("run chats.jsonl --steps 2 --out chat", "to train longer: "),
    "load_into_transformers.py": ("run hf", "The "),
    "explain_attention.py": (
        "--png maps.png",
        "the attention maps of part 3 are drawn in maps.png",
    ),
}
LONGEST = {"explain_attention.py": 165}
"""Most lines of the examples that may have more than 70."""


def test_the_examples_run_one_after_the_other(tmp_path):
    (tmp_path / "mybook.txt").write_text(200 * "the cat sat on the mat, and the dog on the log.\n")
    chats = 4 * (json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    (tmp_path / "chats.jsonl").write_text(chats)
    environment = {"TRITON_INTERPRET": None, "OMP_NUM_THREADS": "1"}
    for name, (arguments, said) in EXAMPLES.items():
        script = ROOT / "examples" / name
        done = warm().run(script, *arguments.split(), cwd=tmp_path, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(rf"^{said}", done.stdout, re.M), done.stdout


def test_the_code_of_the_notebook_runs(tmp_path):
    """`make notebook` runs it as a notebook, with all its steps."""
    notebook = json.loads((ROOT / "examples" / "first_model.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    code = "\n".join("".join(cell["source"]) for cell in cells)
    code = code.replace("STEPS = 300 ", "STEPS = 2 ")
    code = code.replace("from IPython.display import clear_output", "def clear_output(wait): pass")
    script = tmp_path / "first_model.py"
    script.write_text(code)
    environment = {"TRITON_INTERPRET": None, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    done = warm().run(script, cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^done after step 2: ", done.stdout, re.M)
    [difference] = re.findall(r"logits differ from ours by at most (\S+)$", done.stdout, re.M)
    assert float(difference) < 1e-4
    assert "GPT2LMHeadModel on cpu: 0 of 4 ops patched" in done.stdout


def test_every_example_is_run_short_and_says_how_to_run_it():
    scripts = sorted((ROOT / "examples").glob("*.py"))
    assert {script.name for script in scripts} == EXAMPLES.keys()
    for script in scripts:
        text = script.read_text()
        assert len(text.splitlines()) <= LONGEST.get(script.name, 70), script.name
        assert f"    python examples/{script.name}" in text.split('"""')[1]
