"""Loads damaged files: `python -m tests.faults.hostile` writes the record of 10,000 cases.

Each case changes one file, and loads and uses it. Right are a `UserError` of one line, the result
of the unchanged files, or another one where no checksum covers the file or a new one was computed.
"""

import copy
import faulthandler
import hashlib
import io
import json
import os
import random
import re
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro

from fastgpt.checkpoint import checkpoint
from fastgpt.config.config import Config, DataConfig
from fastgpt.convert.saved import saved_config
from fastgpt.convert.source import HF_FILES, open_model
from fastgpt.data.__main__ import main as show_data
from fastgpt.data.dataset import open_data
from fastgpt.data.tokenizers import ByteTokenizer, IdTokenizer, load_tokenizer
from fastgpt.errors import LONGEST, UserError
from fastgpt.sampling.chat import template_of
from fastgpt.sampling.templating import CHATML
from fastgpt.train import init_from
from tests.convert.models import OURS, SUFFIX, converted, foreign, saved_run
from tests.data.sets import prepared, texts, tokenizer_of, write_shard
from tests.processes import ROOT
from tests.runs import octets

RECORD = ROOT / "docs" / "reliability.json"
CPU_S, SPACE = 2.0, 2**29
"""CPU seconds that a case may take, and bytes of address space that it may add."""
RECORDS = ("checkpoint.json", "manifest.json")
"""Files that have checksums of those beside them."""
TALK = [{"role": "user", "content": "the cat sat?"}, {"role": "assistant", "content": "on a mat"}]


def load_model(path: Path) -> object:
    source = open_model(path)
    model, tokenizer = source.build_gpt(), source.tokenizer
    template = template_of(source.hf_files)
    state = [(name, x.shape, octets(x)) for name, x in model.state_dict().items()]
    texts = None if template is None else [*template.pieces(TALK)]
    return model.config, state, texts, None if tokenizer is None else tokenizer.to_json()


def load_foreign(path: Path) -> object:
    return load_model(path / f"model{SUFFIX[path.name]}")


def load_run(path: Path) -> object:
    found, complaints = checkpoint.find(str(path))
    return saved_config(path), found.step, found.state, complaints, load_model(path)


def load_data(path: Path) -> object:
    data, said = open_data(DataConfig(), str(path)), io.StringIO()
    try:
        with redirect_stderr(said):
            show_data([str(path), "--verify"])
    except SystemExit as stopped:
        raise UserError(said.getvalue().strip()) from stopped
    [corpus] = data.corpora
    return corpus.name, data.fingerprint, corpus.train[:].tobytes(), corpus.val[:].tobytes()


def load_tokenizers(path: Path) -> object:
    found = [load_tokenizer(file) for file in sorted(path.iterdir())]
    return [tokenizer.decode(tokenizer.encode(TALK[0]["content"])) for tokenizer in found]


def load_template(path: Path) -> object:
    config = Config(data=DataConfig(chat_template=str(path / "chat.jinja")))
    return [*init_from.chat_template(config, None).pieces(TALK)]


def targets(folder: Path) -> dict[str, tuple[Path, Callable[[Path], object]]]:
    """Writes the files, all small; returns the folders and what loads each."""
    for name in ("nanogpt", "llmc", "shards", "tokenizers", "template"):
        (folder / name).mkdir()
    runs, found = {}, {}
    for name, tokenizer, options in (
        ("gpt2", ByteTokenizer(), {}),
        ("llama", ByteTokenizer(), OURS["llama"]),
        ("erf", IdTokenizer(256), {"activation": "gelu_erf"}),
    ):
        runs[name] = saved_run(folder / name, tokenizer, dim=16, vocab_size=256, **options)
        found[f"run of {name}"] = runs[name], load_run
        add_state(runs[name] / "checkpoints" / "step_00000000")
    for name in ("gpt2", "llama"):
        path = converted(runs[name], folder / f"hf-{name}", "hf", shard_gb=1e-5)
        found[path.name] = path, load_model
    for name, kind in (("gpt2", "llmc"), ("erf", "nanogpt")):
        foreign(runs[name], kind, folder / kind / f"model{SUFFIX[kind]}")
        found[kind] = folder / kind, load_foreign
    for kind in ("bpe", "wordpiece"):
        tokenizer_of(kind).save(folder / "tokenizers" / f"{kind}.json")
    (folder / "template" / "chat.jinja").write_text(CHATML)
    (folder / "hf-llama" / HF_FILES[1]).write_text(json.dumps({"chat_template": CHATML}))
    for split in ("train", "val"):
        write_shard(folder / "shards" / f"{split}_000000.bin", range(200))
    ByteTokenizer().save(folder / "shards" / "tokenizer.json")
    return found | {
        "tokenizers": (folder / "tokenizers", load_tokenizers),
        "template": (folder / "template", load_template),
        "prepared data": (prepared(folder / "data", texts(200)), load_data),
        "shards": (folder / "shards", load_data),
    }


def add_state(path: Path) -> None:
    """Gives a checkpoint without a state one that looks like a trained model's."""
    record, state = path / "checkpoint.json", path / "state.pt"
    old, moments = state.read_bytes(), [{"exp_avg": torch.ones(9), "step": 3} for _ in range(3)]
    torch.save({"optimizers": [{"state": moments, "lr": 0.1}], "loader": {"index": [3]}}, state)
    record.write_bytes(resealed(record.read_bytes(), old, state.read_bytes()))


class Evil:
    """An object whose pickle ends the process, as it could do anything else, when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, ("it ran",)

    def __deepcopy__(self, _: object) -> "Evil":
        return self


def values() -> tuple[Any, ...]:
    """Returns values that a file should not have, new ones each time as they may be changed."""
    return (
        None, True, False, 0, -1, 1, 7, 2**31, 2**40, 2**63, -(2**63), 10**30, 0.5, -1e300, "", "x",
        float("nan"), float("inf"), "../../x", "/etc/passwd", "\ud800", "\0", [], {}, [[]],
        [1, "a"], {"a": {"b": []}}, 3 * [2**20], "a" * 10_000, list(range(5000)),
    )  # fmt: skip


INTS = (0, 1, -1, 2, 3, 255, 2**16, 2**24, 2**31 - 1, -(2**31))


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Lists every (container, key or index) of a tree of dictionaries and lists."""
    found, rest = [], [tree]
    while rest:
        node = rest.pop()
        keys = list(node) if isinstance(node, dict) else range(min(len(node), 20))
        found += [(node, key) for key in keys]
        rest += [node[key] for key in keys if isinstance(node[key], (dict, list))]
    return found


def change_tree(tree: Any, draw: random.Random, *odd: Any) -> Any:
    """Changes up to three values of a tree, or replaces all of it."""
    if draw.random() < 0.03 or not isinstance(tree, (dict, list)):
        return draw.choice(values() + odd)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        if not (known := places(tree)):
            break
        node, key = draw.choice(known)
        other, key_there = draw.choice(known)
        action = draw.choice(("value", "value", "value", "swap", "remove", "double"))
        if action == "value":
            node[key] = draw.choice(values() + odd)
        elif action == "swap":
            node[key] = copy.deepcopy(other[key_there])
        elif action == "remove":
            del node[key]
        elif isinstance(node, dict):
            node[f"{key}2"] = node[key]
        else:
            node.append(node[key])
    return tree


def change_bytes(data: bytes, draw: random.Random) -> bytes:
    """Flips, cuts, extends, doubles, swaps or overwrites bytes, often near the beginning."""
    reach = draw.choice((16, 512, len(data)))
    a, b, c = sorted(draw.randrange(min(reach, len(data)) + 1) for _ in range(3))
    some = draw.randbytes(draw.choice((1, 2, 4, 8, 64)))
    flipped = bytes([(data[a : a + 1] or b"\0")[0] ^ 1 << draw.randrange(8)])
    forms = (
        data[:a] + flipped + data[a + 1 :], data[:a] + some + data[a + len(some) :], data[:a],
        data[a:], data + some, data[:b] + data[a:], data[:a] + bytes(b - a) + data[b:], b"",
        data[:a] + data[b:c] + data[a:b] + data[c:], some,
    )  # fmt: skip
    return draw.choice(forms)


def change_json(data: bytes, draw: random.Random) -> bytes:
    """Changes values of a JSON text, or nests it deeply."""
    depth = draw.choice((0,) * 30 + (2000, 200_000))
    if depth:
        return b'{"a":' * depth + data + b"}" * depth
    tree = json.loads(data)
    return json.dumps(change_tree(tree, draw) if draw.random() < 0.8 else tree).encode()


def change_template(data: bytes, draw: random.Random) -> bytes:
    """Inserts a piece into a chat template: an error, or what the sandbox refuses."""
    at, piece = draw.randrange(len(data) + 1), draw.choice(PIECES).encode()
    return data[:at] + piece + data[at:]


PIECES = (
    "{% if 1 %}", "{% for a in range(99999999) %}{% endfor %}", "{{ raise_exception('no\\nno') }}",
    "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}", "{{ messages.__class__.__mro__ }}",
    "{% include 'x' %}", "{{ messages | tojson }}", "{{ 0 / 0 }}", "\0",
)  # fmt: skip


def change_safetensors(data: bytes, draw: random.Random) -> bytes:
    """Changes the length of the header, or values in it: dtypes, shapes and offsets."""
    end = 8 + int.from_bytes(data[:8], "little")
    if draw.random() < 0.2:
        length = draw.choice((0, 1, 7, end, len(data), 2**31, 2**63, 2**64 - 1))
        return struct.pack("<Q", length) + data[8:]
    header = change_json(data[8:end], draw)
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data[end:]


def change_header(data: bytes, draw: random.Random) -> bytes:
    """Changes a number of the header of a shard or of a model of llm.c."""
    at = 4 * draw.randrange(9)
    return data[:at] + struct.pack("<i", draw.choice(INTS)) + data[at + 4 :]


def change_saved(data: bytes, draw: random.Random) -> bytes:
    """Changes values of what torch.save wrote."""
    tree = torch.load(io.BytesIO(data), weights_only=True)
    odd = (Evil(), torch.zeros(3), torch.zeros(0, dtype=torch.int64), {1: 2})
    tree, file = change_tree(tree, draw, *4 * odd), io.BytesIO()
    torch.save(tree, file)
    return file.getvalue()


MEANT: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".json": change_json, ".safetensors": change_safetensors, ".bin": change_header,
    ".pt": change_saved, ".jinja": change_template,
}  # fmt: skip
"""Suffix of a file -> how its content is changed."""


def damage(whole: dict[Path, bytes], draw: random.Random) -> tuple[Path, str, bool]:
    """Changes one of some files: (the file, how, whether a checksum must notice it)."""
    path = draw.choice(list(whole))
    old, records = whole[path], [path.with_name(name) for name in RECORDS]
    how = draw.choice(("bytes", "meaning", "meaning", "meaning", "swapped", "gone"))
    record = next((x for x in records if hashed(old) in whole.get(x, b"")), None)
    path.unlink()
    if how == "gone":
        if draw.random() < 0.5:
            path.mkdir()
        return path, how, record is not None
    swapped = draw.choice(list(whole.values()))
    change = {"bytes": change_bytes, "meaning": MEANT[path.suffix]}.get(how, lambda *_: swapped)
    path.write_bytes(new := change(old, draw))
    if record is None or draw.random() < 0.3:
        return path, how, record is not None
    record.write_bytes(resealed(whole[record], old, new))
    return path, f"{how}, new checksum", False


def hashed(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def resealed(record: bytes, old: bytes, new: bytes) -> bytes:
    """Replaces the sha256 of a file in a record."""
    return record.replace(hashed(old), hashed(new))


def outcome(load: Callable[[], object], expected: str, covered: bool) -> tuple[str, float]:
    """Loads files: (`refused`, `equal`, `other content`, or what is wrong; CPU seconds)."""
    # KeyboardInterrupt, which no `except Exception` may hide
    signal.signal(signal.SIGPROF, signal.default_int_handler)
    faulthandler.dump_traceback_later(60 * CPU_S, exit=True)  # a loop that Python cannot stop
    began = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            said = "equal" if repr(load()) == expected else "other content"
        if covered and said == "other content":
            said = "FAULT: not noticed"
    except UserError as error:
        clean = len(str(error).splitlines()) == 1 and len(str(error)) <= LONGEST
        said, trace = "refused", traceback.format_exc()
        if not clean or re.search("MemoryError|allocate memory", trace):
            said = f"FAULT: no line, or memory: {trace[-3000:]}"
    except BaseException:
        said = f"FAULT: {traceback.format_exc()[-3000:]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
    took = time.process_time() - began
    return (f"FAULT: {took:.1f} s" if took > CPU_S else said), took


def table(counts: Counter[tuple[str, str, str]]) -> str:
    """Returns the counts of (files, file, outcome) as a table of Markdown."""
    sums, columns = Counter(), ("refused", "equal", "other content", "FAULT")
    for (name, _, said), n in counts.items():
        sums[name, said] += n
    rows = [f"| files | {' | '.join(columns)} |", "| --- | --: | --: | --: | --: |"]
    for name in sorted({name for name, _ in sums}):
        found = (f"{sums[name, said]:,}" for said in columns)
        rows.append(f"| {name} | {' | '.join(found)} |")
    return "\n".join(rows)


def run_cases(folder: Path, cases: int, seed: int, out: Path) -> int:
    """Loads damaged files, prints those with a fault and a table, and writes the record."""
    known, counts, slowest = targets(folder), Counter(), 0.0
    whole = {
        name: {path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
        for name, (root, _) in known.items()
    }
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        expected = {name: repr(load(root)) for name, (root, load) in known.items()}
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPACE, resource.RLIM_INFINITY))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    for number in range(cases):
        draw = random.Random(f"{seed} {number}")
        name = draw.choice(list(known))
        root, load = known[name]
        path, how, covered = damage(whole[name], draw)
        said, took = outcome(partial(load, root), expected[name], covered)
        slowest = max(slowest, took)
        if said.startswith("FAULT"):
            print(f"case {number}: {name}, {path}, {how}: {said}", flush=True)
        counts[name, path.name, said.split(":")[0]] += 1
        if path.is_dir():
            path.rmdir()
        for file, content in whole[name].items():
            file.write_bytes(content)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    record = {
        "cases": cases, "seed": seed, "seconds": round(time.perf_counter() - start),
        "slowest_cpu_s": round(slowest, 2), "grown_mib": grown // 1024,
        "counts": [[*key, n] for key, n in sorted(counts.items())],
    }  # fmt: skip
    out.write_text(json.dumps(record).replace("[[", "[\n[").replace("], [", "],\n[") + "\n")
    print(table(counts))
    return int(any(said == "FAULT" for _, _, said in counts))


def main(cases: int = 10_000, seed: int = 0, out: Path = RECORD) -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FASTGPT_CACHE"] = f"{folder}/cache"
        return run_cases(Path(folder), cases, seed, out)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
