"""Each script of examples/ runs, with a text and settings that take a moment."""

import json
import re

import pytest

from tests.processes import ROOT, script

pytestmark = pytest.mark.slow
EXAMPLES = ROOT / "examples"

# Arguments, and how a line of the output begins. They run in this order, in one folder.
SHORT = {
    "train_your_text.py": ("mybook.txt --steps 2 --out run", "The "),
    "own_dataset.py": ("--steps 2 --out sums", r"\d+ of 1000 answers are right"),
    "own_kernel.py": ("", r"loss \d\.\d+, of a model with <function gelu at \w+>"),
    "fine_tune.py": ("run chats.jsonl --steps 2 --out chat", "to train longer: "),
    "load_into_transformers.py": ("run hf", "The "),
    "explain_attention.py": ("--png maps.png", "the attention maps"),
}


def printed(path, *arguments, cwd):
    done = script(path, *arguments, cwd=cwd, OMP_NUM_THREADS="1", MPLBACKEND="agg")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_examples_run_one_after_the_other(tmp_path):
    assert {path.name for path in EXAMPLES.glob("*.py")} == SHORT.keys()
    (tmp_path / "mybook.txt").write_text(200 * "the cat sat on the mat, and the dog on the log.\n")
    chats = 4 * (json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    (tmp_path / "chats.jsonl").write_text(chats)
    for name, (arguments, said) in SHORT.items():
        out = printed(EXAMPLES / name, *arguments.split(), cwd=tmp_path)
        assert re.search(rf"^{said}", out, re.M), out


def test_the_code_of_the_notebook_runs(tmp_path):
    notebook = json.loads((EXAMPLES / "first_model.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    code = code.replace("STEPS = 300 ", "STEPS = 2 ")
    code = code.replace("from IPython.display import clear_output", "def clear_output(wait): pass")
    path = tmp_path / "first_model.py"
    path.write_text(code)
    out = printed(path, cwd=tmp_path)
    assert re.search(r"^done after step 2: ", out, re.M)
    [difference] = re.findall(r"logits differ from ours by at most (\S+)$", out, re.M)
    assert float(difference) < 1e-4
