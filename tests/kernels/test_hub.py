"""The folder of `kernels.hub` works with Hugging Face's `kernels` and transformers, and without us.

Their library has the name of our folder, so it runs in an environment and a folder of its own.
"""

import re
import sys

import pytest

from fastgpt import kernels
from fastgpt.commands import installed
from fastgpt.kernels import hub
from tests.processes import ended

SCRIPT = """
import copy, importlib.util, itertools, socket, sys
from pathlib import Path
socket.socket.connect = socket.create_connection = None  # nothing is downloaded
import torch, kernels
from kernels._rust import Build, Digest, Metadata

assert not any(map(importlib.util.find_spec, ("fastgpt", "bench", "train", "kernels.norm")))
folders = [Path(name) for name in sys.argv[1:]]
both = [kernels.get_local_kernel(folder) for folder in folders]
assert both[0].__name__ != both[1].__name__
torch.manual_seed(0)

def close(a, b):
    bound = 2e-2 if a.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(a, b, rtol=bound, atol=bound)

for folder in folders:
    Build.open(folder)
    for variant in folder.glob("build/torch-*"):
        digest = Metadata.read_from_file(variant / "metadata.json").digest
        digest.validate(Digest.hash_variant(digest.algorithm, variant))
kinds = itertools.product(both, (True, False), (torch.float32, torch.bfloat16))
for ours, interpreted, dtype in kinds:
    runtime = sys.modules[ours.__name__ + ".runtime"]
    runtime.INTERPRETING = interpreted  # else the plain form for CPUs
    x, weight, dy = (torch.randn(*n, 48, dtype=dtype, requires_grad=True) for n in ((5,), (), (5,)))
    forms = ours.rms_norm(x, weight), torch.nn.functional.rms_norm(x, (48,), weight, 1e-6)
    close(*forms)
    for pair in zip(*(torch.autograd.grad(y, (x, weight), dy) for y in forms)):
        close(*pair)
    q, k, v = torch.randn(3, 1, 2, 20, 16, dtype=dtype).unbind()
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    close(ours.attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2), right)
    whole = torch.compile(ours.layer_norm, backend="aot_eager", fullgraph=True)
    close(whole(x.detach(), weight.detach()), ours.layer_norm(x, weight))
    last = runtime.LAUNCHES
assert last == sys.modules[both[0].__name__ + ".runtime"].LAUNCHES
print(*last)

from transformers import utils

# transformers asks for a version that the package index does not have yet, and knows no CPU
utils.is_kernels_available = utils.import_utils.is_kernels_available = lambda: True
utils.kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES.append("cpu")
from transformers import AutoConfig, AutoModelForCausalLM, KernelConfig

kernels.replace_kernel_forward_from_hub(torch.nn.LayerNorm, "LayerNorm")
sizes = dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
dropout = dict(attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
tokens = torch.randint(99, (2, 16))
for kind, activation, names in (
    ("llama", None, ["RMSNorm"]), ("gpt2", "gelu_new", ["LayerNorm", "NewGELU"]),
    ("gpt2", "gelu_pytorch_tanh", ["GeluTanh"]), ("gpt2", "gelu", ["GeLU"]),
):
    config = AutoConfig.for_model(kind, **sizes, **dropout, activation_function=activation)
    plain = AutoModelForCausalLM.from_config(config)
    for train, (ours, folder) in enumerate(zip(both, folders)):
        model = copy.deepcopy(plain).train(train == 1)
        config = {name: f"{folder}:{name}" for name in names}
        model.set_use_kernels(True, KernelConfig(config, use_local_kernel=True))
        modules = [module.forward.__func__.__module__ for module in model.modules()]
        outs = {it: it(tokens, labels=tokens) for it in (plain, model)}
        close(*(out.logits for out in outs.values()))
        found = [torch.autograd.grad(out.loss, [*it.parameters()]) for it, out in outs.items()]
        for pair in zip(*found):
            close(*pair)
    print(*names, modules.count(ours.__name__ + ".layers"))
"""
PRINTED = """\
_norm_fwd_kernel _norm_bwd_kernel _reduce_partials_kernel _attention_fwd_kernel
RMSNorm 5
LayerNorm NewGELU 7
GeluTanh 2
GeLU 2
"""


@pytest.mark.skipif(installed("kernels") is None, reason="needs Hugging Face's kernels")
def test_two_versions_compute_what_torch_does_and_replace_layers_of_models(tmp_path):
    """The environment has all that is installed here, but for what is installed editable."""
    folders, venv = [str(tmp_path / number) for number in "12"], tmp_path / "venv"
    for folder in folders:
        hub.main(["--out", folder, "--version", folder[-1]])
    assert ended(sys.executable, "-m", "venv", "--without-pip", venv).returncode == 0
    [site] = venv.glob("lib/python*/site-packages")
    here = [path for path in sys.path if path.endswith("-packages")]
    (site / "here.pth").write_text("\n".join(here))
    done = ended(
        venv / "bin" / "python", "-c", SCRIPT, *folders, cwd=tmp_path, PYTHONPATH=None,
        TRITON_INTERPRET="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0", HF_HUB_OFFLINE="1",
    )  # fmt: skip
    assert (done.stdout, done.returncode) == (PRINTED, 0), done.stderr


def test_a_variant_has_the_ops_and_what_they_import():
    contents = hub.files()
    assert all(f'    "{name}",\n' in contents["__init__.py"].decode() for name in kernels.__all__)
    assert {"attention/tuning/sm_90.json", "LICENSE"} <= {*contents}
    text = b"".join(it for name, it in contents.items() if name.endswith(".py")).decode()
    imports = re.findall(r"^ *(?:from (\S+) )?import (\w+)", text, re.M)
    places = {(place or name).partition(".")[0] for place, name in imports}
    assert places - sys.stdlib_module_names == {"", "torch", "triton"}  # "": relative
    parts = {part for place, name in imports for part in (*place.split("."), name)}
    assert not parts & hub.NOT_OPS
    changed = contents | {"sums.py": b""}
    ids = {hub.metadata(it, "cuda", v)["id"] for it in (contents, changed) for v in (0, 1)}
    assert len(ids) == 4


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "build").mkdir()
    for version, said in ((0, "other files"), (-1, "-1")):
        with pytest.raises(ValueError, match=said):
            hub.build(tmp_path, version)
    for version in (1, 2):  # the second in place of the first
        hub.build(tmp_path / "new", version)
    assert "version = 2\n" in (tmp_path / "new" / "build.toml").read_text()
