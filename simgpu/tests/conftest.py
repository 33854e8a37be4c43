"""Lets the processes that tests start import simgpu, which need not be installed."""

import os
import sys
from pathlib import Path

SOURCE = str(Path(__file__).parents[1] / "src")
sys.path.insert(0, SOURCE)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))
