"""Planted differences between two runs are found: at their step, layer and kind of tensor."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastgpt.checkpoint.tensors import octets
from fastgpt.compare import __main__ as compare
from fastgpt.files import sha256_of
from fastgpt.ops import torch_ops
from fastgpt.train.engine import Engine
from tests.runs import before_each

DROPOUT = "--model.dropout 0.1 --optim.kind adamw --train.micro-batch 4"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return {}
