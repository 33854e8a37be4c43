"""Settings of a run: dataclasses, their checks, and recipes."""

from fastgpt.config.config import Config as Config
from fastgpt.config.config import DataConfig as DataConfig
from fastgpt.config.config import OpsConfig as OpsConfig
from fastgpt.config.config import OptimConfig as OptimConfig
from fastgpt.config.config import ParallelConfig as ParallelConfig
from fastgpt.config.config import TrainConfig as TrainConfig
