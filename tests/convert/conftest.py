"""A tiny run that starts from a model."""

import pytest

SMALL = (
    "--train.device cpu --train.precision fp32 --train.batch-tokens 80 --train.sample-tokens 0"
    " --log-every 1 --eval-every 0 --optim.kind adamw --optim.lr 2e-3 --optim.schedule constant"
    " --optim.warmup-steps 0 --optim.beta1 0.9"
)


@pytest.fixture
def argv(tiny, text, tmp_path):
    """Returns the command line of a run that starts from a model; flags given later win."""

    def flags(source, more="", recipe="baby"):
        place = ["--data.source", str(text), "--run-dir", str(tmp_path / "run")]
        return [recipe, *SMALL.split(), *place, "--init-from", str(source), *more.split()]

    return flags
