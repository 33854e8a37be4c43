"""Lets the processes that tests start import simgpu, which need not be installed."""

import os
from pathlib import Path

PATHS = [str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, PATHS))
