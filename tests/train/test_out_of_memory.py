"""Ranks whose memory runs out in the rehearsal: all halve the micro-batch, or all end.

Run as a module, `JOBS`, it trains the runs of a JSON file one after the other on each of two ranks.
Memory is that of a CPU; a hook of the last normalisation or of the loss simulates its end.
"""

import gc
import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from fastgpt.cli import parse
from fastgpt.device import device
from fastgpt.errors import shown_in_one_line
from fastgpt.faults.failure import abort_all_ranks
from fastgpt.parallel.distributed import World
from fastgpt.train import micro_batch
from fastgpt.train.trainer import Trainer
from tests.device.test_kinds import OnTheCPU
from tests.runs import finish, series, torchrun

FLAGS = (
    "--model.num-layers 2 --optim.kind adamw --train.batch-tokens 384 --steps 2 --eval-every 1"
    " --train.sample-tokens 0 --train.micro-batch"
)
FSDP = "--parallel.kind fsdp"
HALVED = {
    "fsdp": (FSDP, "backward", None),
    "tp": (f"{FSDP} --parallel.tp 2", "forward", None),
    "ddp": ("", "backward", "1"),
    "compiled": (f"{FSDP} --train.compile on", "forward", None),
}
"""Settings, where a second micro-step of over 1 sequence fails, and on which rank."""
unlimited = micro_batch.rehearse


def run_out(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def rehearse(place, rank, held, loss, *rest):
    """Fails as `HALVED` says; each micro-step adds its gradients' bytes to `held`."""
    model = getattr(loss, "module", loss)
    if not held:
        model.register_forward_pre_hook(lambda *_: held.extend(gradient_bytes(len(held))))

    def run(x, y):
        fails = len(x) > 1 and len(held) % 2 and rank in (None, os.environ["RANK"])
        early = run_out if fails and place == "forward" else lambda *_: None
        with model.ln_f.register_forward_pre_hook(early):
            value = loss(x, y)
        if fails:
            value.register_hook(run_out)
        return value

    unlimited(run, *rest)


def gradient_bytes(counted):
    """Counts the bytes of all parameters' gradients, parts or whole ones: [bytes].

    It takes a tenth of a second, so micro-steps beyond the second of training have no number.
    """
    if counted == 10 or not torch.is_grad_enabled():
        return []
    found = [x.grad for x in gc.get_objects() if torch.Tensor in type(x).__mro__ and x.is_leaf]
    parts = [getattr(x, "_local_tensor", x) for x in found if x is not None]
    return [sum({x.data_ptr(): x.nbytes for x in parts}.values())]


def main(jobs: str) -> None:
    micro_batch.REHEARSED = {"cpu", "cuda"}
    micro_batch.ALONE_S = 1.0
    compiling = torch.nn.Module.compile
    torch.nn.Module.compile = lambda *args, **kw: compiling(*args, backend="eager", **kw)
    with abort_all_ranks(), shown_in_one_line():
        for argv, place, rank in json.loads(Path(jobs).read_text()):
            held = []
            micro_batch.rehearse = partial(rehearse, place, rank, held)
            trainer = Trainer(parse(argv))
            trainer.fit()
            if trainer.world.is_main:
                (trainer.run_dir / "held.json").write_text(json.dumps(held))


def started(folder: Path, *jobs: object):
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    return torchrun(2, "-m", "tests.train.test_out_of_memory", str(path), forks=True)


@pytest.mark.skipif(not device.has_compiler(), reason="no C++ compiler")
def test_a_micro_batch_that_does_not_fit_is_halved_on_all_ranks(fit, tiny, tmp_path):
    """Losses are those of one process, and no step holds more gradients than were rehearsed.

    A global batch of 24 sequences is tried with micro-batches of 12, 6, 3 and 1.
    """
    jobs = []
    for name, (flags, *fault) in HALVED.items():
        jobs.append((tiny(FLAGS, "12", flags, f"--run-dir {tmp_path / name}"), *fault))
    output = finish(started(tmp_path, *jobs))
    assert output.count("for which the GPU's memory is too small: using 1,") == len(HALVED)
    one = fit(FLAGS, "1")
    for name in HALVED:
        for key in ("train_loss", "val_loss"):
            found = series(tmp_path / name, key)
            assert found == pytest.approx(series(one, key), rel=1e-5), name
        held = json.loads((tmp_path / name / "held.json").read_text())
        assert max(held[6:8]) >= max(held[8:]) > 0, name


@pytest.mark.parametrize(("flags", "place"), [(FSDP, "backward"), ("--parallel.cp 2", "forward")])
def test_one_rank_alone_without_memory_ends_all(flags, place, tiny, tmp_path):
    """The other rank waits for it in the middle of a step."""
    _, errors = started(tmp_path, (tiny(FLAGS, "12", flags), place, "1")).communicate(timeout=90)
    said = (
        "[rank 1] error: no GPU memory left on some ranks with micro-batches of 12, in the middle"
    )
    assert errors.count(f"{said} of a step in which the others wait for them: pass a smaller") == 1


@pytest.mark.parametrize(("total", "margin"), [(80, 1.5), (8, 0.5)])
def test_all_ranks_may_allocate_what_the_fullest_gpu_has_left(total, margin, monkeypatch):
    """Another rank has 5 GiB free, this one 6 besides the 2 that it has reserved."""
    limits, exchanged, gib = [], [], 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (6 * gib, total * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 * gib)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    monkeypatch.setattr(World, "all_gather_object", lambda _, free: [free, free - gib])
    monkeypatch.setattr(World, "sum", lambda _, x: exchanged.append(x.nbytes))
    with OnTheCPU("cuda"), micro_batch.equal_memory("cuda", World(size=2), 2**20):
        assert (exchanged, limits) == ([2**20], [(2 + 5 - margin) / total])
    assert limits[1:] == [1.0]


if __name__ == "__main__":
    main(sys.argv[1])
