"""Each command of the Makefile, README, CONTRIBUTING and docs runs, in a short form.

`make test-full ARGS=tests/test_commands.py` runs them; they are slow for `make test`. On
every change run those that `NIGHTLY` leaves.
"""

import gzip
import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from fastgpt.cli import configure
from tests.commands import ROOT, commands, commands_in
from tests.data.sets import gpt2_files
from tests.processes import ended
from tests.warm import warm

pytestmark = pytest.mark.slow

RUN = "runs/baby-20261120-101500"
TINY = (
    " --steps 1 --eval-every 0 --model.num-layers 1 --model.context 16 --train.batch-tokens 256"
    " --data.eval-tokens 64 --data.final-eval-tokens 64 --train.sample-tokens 1"
    " --train.device cpu"
)
DROPOUT = "--op dropout --size tiny --rounds 2"
SLOT = '--static --arch 80 --only "sm_80 fwd 16 bits D=16,32 plain" --top 1'
ONE_CASE = '"test_parity and rotary-grouped-fp32 and sm_90"'
UNTRAINED = " --(help|resume|list|version|print)"
# What makes a command short: text that is replaced, or, where the pattern ends the command, added.
SHORTER = [
    (r" > run\.yaml", ""),
    (r"\$lr", "0.01"),
    (r"--track [a-z$ ]+\b", "--track tensorboard"),  # others write elsewhere: tests/logs
    (r" --(steps|gpt-steps) \S+", ""),
    (r" --epochs \S+", ""),
    (r" (VENV|PYTHON)=\S+", ""),
    (r"^(torchrun.*)=8", r"\1=2"),
    (
        r"^(python train\.py|torchrun)((?! --(help|resume|list|version|print)| -m ).)*$",
        rf"\g<0>{TINY}",
    ),
    (r"^make train$", rf"make train ARGS='{TINY}'"),
    (r"^make (test|test-full)( ARGS=.*)?$", r"make \1 ARGS='-n0 tests/test_architecture.py'"),
    (r"^make parity(-full)?$", rf"\g<0> ARGS='-n0 -k {ONE_CASE}'"),
    (r"^make mutants$", "make mutants ARGS='--count 0'"),
    (r"^make chaos$", "make chaos ARGS='--tries 1 --only preparing --out out.json'"),
    (r"^make bench$", f"make bench ARGS='{DROPOUT} --out out'"),
    (r"^make bench ARGS=--publish$", "make bench ARGS='--op dropout --dtype fp32 --publish'"),
    (r"^make reproduce$", "make reproduce ARGS='--only A'"),
    (r"^make hub$", "make hub ARGS='--out out'"),
    (r"^make tune$", "make tune ARGS=--help"),  # python -m bench.tune is run
    (r"^make clean$", f"make -f {ROOT}/Makefile clean"),
    (r"chats.jsonl.*", r"\g<0> --model.context 96 --train.batch-tokens 192"),
    (r"--tokens \d+", "--tokens 2"),
    (r"fastgpt\.sample RUN", f"fastgpt.sample {RUN}"),
    (r"(fastgpt\.doctor) gpt2-1558m .*$", r"\1 baby --gpu h100"),
    (r"(fastgpt\.compare) \S+ \S+(.*)$", rf"\1 {RUN} {RUN}\2"),
    (r"runs/wider\b", RUN),
    (r"^python -m kernels\.aot( --static)?$", r"\g<0> --only _reduce_partials"),
    (r"^python -m kernels\.aot.*$", r"\g<0> --arch 90"),
    (r"^(python -m tests.proof.execute.coverage).*$", r"\1 --only rotary"),
    (r"48 1600 50257", "2 64 100"),
    (r"^python -m tests.faults.hostile$", r"\g<0> --cases 5 --out out.json"),
    (r"--only norm\b", "--only _reduce_partials"),
    (r"^python -m bench --op.*$", r"\g<0> --quick --rounds 2"),
    (r"^python -m bench.generate$", r"\g<0> shakespeare-cpu --prompt 8 --tokens 3 --rounds 2"),
    (r"^python -m bench.step$", r"\g<0> --tiny --rounds 1 --implementations fastgpt"),
    (r"^python -m bench.tune$", rf"\g<0> {SLOT}"),
]
# How the last line begins, where it tells that all went well.
LAST = {
    r"(python train.py|torchrun|make train)(?!.* (--help|--print|-m ))": "to train longer: ",
    r"python -m fastgpt.prepare": "wrote .*/data/",
    r"python -m fastgpt.evaluate": r"mybook.txt +bits_per_byte +\d",
    r"python -m fastgpt.doctor": "0 problems, ",
    r"python -m fastgpt.compare": "nothing that decides the result differs",
    r"python -m fastgpt.report": r"wrote .*\.html",
    r"make bench( |$)": r"wrote .*\.md$|slower than the record of ",
    r"make (test|test-full|parity|parity-full)( |$)": r"\d+ passed",
}
# Not run here, each with the reason; the arguments are checked all the same.
EXEMPT = {
    r"make (gpu|rehearsal)": "needs a GPU, or an hour to simulate one",
    r"make lint": ".ci/run runs it before the tests",
    r"make setup EXTRAS=": "downloads packages",
    r"make docs": "needs the extra docs: the workflow's job docs builds it",
    r"make notebook": "that job runs it; tests/test_examples.py runs its code",
    r"python -m fastgpt.serve": "serves until it is stopped: tests/serve",
    r"make simgpu": "makes an environment of its own, of 2 GB: the part simgpu of .ci/run",
    r"make real": "installs a model: the workflow's job slow",
    r"make bench-regress": "pytest-benchmark does not run beside other tests",
    r"python -m bench.race": "needs a checkout of nanoGPT",
    r"make op": "the part gate of .ci/run runs it",
    r"make gate": "the part gate of .ci/run runs it",
    r"python -m kernels.upgrade": "installs two versions of Triton: tests/proof/test_upgrade.py",
    r"python examples/": "tests/test_examples.py runs them",
    r"python -m fastgpt.prepare fineweb-edu": "downloads 10 billion tokens",
    r"python train.py (tinystories-char|pubmed)": "needs texts that are not here",
    r"python -m fastgpt.evaluate .*--tasks": "downloads tasks: tests/evaluate/test_harness.py",
    r"torchrun --nnodes": "needs two machines: tests/parallel/test_elastic.py has two of them",
    r"torchrun .* --no-python": "needs an installed package: tests/test_package.py installs one",
}
# Run every night alone: on each change others run the same program, and a command's flags are read.
NIGHTLY = (
    r"python train\.py (lecture|gpt2|shakespeare)", r"torchrun .*parallel",
    r"make (reproduce|parity-full|test-full|bench ARGS|train)",
    r"python -m bench --op", r"python -m bench\.tune", r"python -m kernels\.aot .*=50304",
)  # fmt: skip
FOUND = commands()


def exempt(command: str) -> str | None:
    return next((why for pattern, why in EXEMPT.items() if re.match(pattern, command)), None)


def shortened(command: str) -> str:
    for pattern, short in SHORTER:
        command = re.sub(pattern, short, command)
    return command


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Makes a folder that looks like a checkout, with the files that the commands name."""
    for name in (
        *("train.py", "Makefile", "pyproject.toml", "constraints.txt"),
        *("fastgpt", "kernels", "simgpu", "tests"),
    ):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("bench", "docs"):  # commands write there
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("results"))
    (tmp_path / "yourfile.py").symlink_to(ROOT / "simgpu/tests/executor/yourfile.py")
    text = "the cat sat on the mat, and the dog sat on the log.\n"
    (tmp_path / "mybook.txt").write_text(40 * text)
    (tmp_path / "run.yaml").write_text("recipe: baby\ndata: {source: mybook.txt}\n")
    (tmp_path / "chats.jsonl").write_text(2 * '{"prompt": "a", "completion": "b"}\n')
    stories = (f"{i}: {text}" for i in range(2000))
    (tmp_path / "stories.txt").write_text("<|endoftext|>".join(stories))
    (tmp_path / "dump").mkdir()
    with gzip.open(tmp_path / "dump" / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": f"{i}: {text}"}) + "\n" for i in range(2000))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(checkout):
    """Function that runs a command, which must succeed, and returns its output."""

    def run(command: str) -> str:
        words = shlex.split(command)
        if words[0] == "python":
            done = warm().run(*words[1:], cwd=checkout, TRITON_INTERPRET=None)
        else:
            if words[0] == "make":
                words[1:1] = ["--no-print-directory", "VENV=none", f"PYTHON={sys.executable}"]
            elif words[0] == "torchrun":
                words[:1] = [sys.executable, "-m", "torch.distributed.run"]
            done = ended(*words, cwd=checkout, TRITON_INTERPRET=None)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    return run


@pytest.fixture
def trained(run, tmp_path_factory) -> None:
    """Trains the run that the pages name, once for a worker, and copies it into the checkout."""
    kept = tmp_path_factory.getbasetemp() / "runs"
    if not kept.exists():
        run(shortened(f"python train.py baby --data.source mybook.txt --run-dir {RUN}"))
        shutil.move("runs", kept)
    shutil.copytree(kept, "runs")


def last_line(printed: str) -> str:
    return printed.rstrip().rpartition("\n")[2]


RUNNABLE = {shortened(command.text): command for command in FOUND if not exempt(command.text)}
"""A command for each short form: one that runs in the same short form as another is run once."""


def every_change(command: str) -> list[pytest.MarkDecorator]:
    nightly = any(re.match(pattern, command) for pattern in NIGHTLY)
    return [] if nightly else [pytest.mark.every_change]


@pytest.mark.parametrize(
    "short",
    [
        pytest.param(short, id=command.text, marks=every_change(command.text))
        for short, command in RUNNABLE.items()
    ],
)
def test_it_ends_well_and_says_so(short, run, request):
    command = RUNNABLE[short]
    if re.search("shakespeare|lecture", short):
        request.getfixturevalue("shakespeare")
    if "data/mine" in short:
        gpt2_files()
    if RUN in short:
        request.getfixturevalue("trained")
    if "report" in short:
        pytest.importorskip("bokeh", reason="needs the extra report")
    if "data/mine" in short and "--out" not in short:
        run("python -m fastgpt.prepare dump/a.jsonl.gz --out data/mine")
    last = last_line(run(short))
    expected = next((last for pattern, last in LAST.items() if re.match(pattern, short)), ".")
    assert re.match(expected, last), f"{command.page}:{command.line}: {last}"


NOT_RUN = [c for c in FOUND if exempt(c.text) or not every_change(c.text)]


@pytest.mark.every_change
@pytest.mark.parametrize("command", [pytest.param(c, id=c.text) for c in NOT_RUN])
def test_the_arguments_of_what_is_not_run_are_right(command, run):
    words = command.words
    module = words[words.index("-m") + 1] if "-m" in words else ""
    if words[0] == "make":
        subprocess.run([*words, "-n", f"--file={ROOT}/Makefile", "VENV=none"], check=True)
    elif module:
        run(f"python -m {module} --help")
    elif words[1].startswith("examples/"):
        assert (ROOT / words[1]).is_file()
    else:
        start = next(i for i, word in enumerate(words) if "train" in word)
        configure(words[start + 1 :])


@pytest.mark.every_change
def test_a_reason_stands_for_a_command_that_there_is():
    for pattern in (*EXEMPT, *NIGHTLY):
        assert any(re.match(pattern, command.text) for command in FOUND), pattern


@pytest.mark.every_change
def test_commands_are_found_in_blocks_and_sentences():
    page = "Say `make a`, `no`.\n```\n$ make b  # why\npython c \\\n  --d 1\nout\n```\n`make`\n"
    assert [*commands_in(page)] == [(1, "make a"), (3, "make b"), (4, "python c --d 1")]
