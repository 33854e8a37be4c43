"""Serving: texts that share a batch, OpenAI's interface by OpenAI's package, and the page."""

import json
import queue
import socket
import threading
import time
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest

import pytest
import torch

import fastgpt
from fastgpt.data.tokenizers import ByteTokenizer
from fastgpt.errors import UserError
from fastgpt.kernels.decode_attention import op as decode_attention_op
from fastgpt.sampling.chat import CHATML, Template
from fastgpt.sampling.streaming import Continuation
from tests.models import sharp
from tests.sampling.test_streaming import Letters

openai = pytest.importorskip("openai")
httpx2 = pytest.importorskip("httpx2")  # which it brings
uvicorn = pytest.importorskip("uvicorn")
from fastgpt.serve.__main__ import ServeConfig  # noqa: E402 - what the extra serve installs
from fastgpt.serve.app import Server  # noqa: E402
from fastgpt.serve.engine import BusyError, Engine, Job  # noqa: E402


@pytest.fixture(autouse=True)
def _without_the_interpreter(monkeypatch):
    """Its products depend on the place of a row."""
    monkeypatch.setattr(decode_attention_op, "runs_kernels", lambda device: False)


@contextmanager
def running(model, **options):
    engine = Engine(model, **options)
    try:
        yield engine
    finally:
        engine.close()


def job(tokenizer, ids, new=5):
    """Returns a job, and the function that waits for its tokens."""
    events = queue.Queue()
    text = Continuation(tokenizer, torch.tensor(ids), max_new_tokens=new, temperature=0, logprobs=2)

    def tokens():
        found = []
        while True:
            event = events.get(timeout=60)
            if isinstance(event, Exception):
                raise event
            found += event.tokens
            if event.finish:
                return found

    return Job(torch.tensor(ids), text, events.put, time.monotonic() + 60), tokens


ROTARY = {"position": "rotary", "window": 5, "num_kv_heads": 1}
DOCUMENTS = {"document_mask": True, "eot_id": 7}


@pytest.mark.parametrize("options", [{}, ROTARY, DOCUMENTS], ids=str)
@pytest.mark.parametrize("mode", ["exact", "fp32", "bf16"])
def test_greedy_texts_of_a_batch_are_those_of_each_alone(options, mode, capsys):
    """Texts of many lengths take turns in three slots.

    Without `exact`, a text may part where two tokens are nearly as likely, which is printed.
    """
    model = sharp(num_heads=2, dim=16, vocab_size=30, context=24, **options)
    tokenizer, exact = Letters(eot_id=5), mode == "exact"
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=mode == "bf16")
    with running(model, slots=3, exact=exact, autocast=autocast) as engine:
        prompts = [torch.randint(30, (n,)).tolist() for n in (1, 9, 3, 24, 2, 14, 5, 11, 1, 20)]
        jobs = [job(tokenizer, ids, min(12, 25 - len(ids))) for ids in prompts]
        engine.submit([each for each, _ in jobs])
        got = [tokens() for _, tokens in jobs]
    for ids, tokens in zip(prompts, got):
        about = {"max_new_tokens": min(12, 25 - len(ids)), "temperature": 0, "logprobs": 2}
        with autocast():
            pieces = [*fastgpt.stream(model, tokenizer, torch.tensor(ids), exact=exact, **about)]
        alone = [token for piece in pieces for token in piece.tokens]
        pairs = enumerate(zip_longest(tokens, alone))
        first, other = next(
            ((i, b) for i, (a, b) in pairs if not (a and b and a.id == b.id)), (0, None)
        )
        if exact or other is None:
            assert tokens == alone or (not exact and len(tokens) == len(alone))
            continue
        with capsys.disabled():
            print(f"\n{mode}, {len(ids)} tokens: new token {first} is the first to differ")
        assert other.top[0][1] - other.top[1][1] < 0.1
    assert not fastgpt.kernels.is_batch_invariant()


def test_the_queue_is_limited_and_texts_that_end_early_leave_no_trace(monkeypatch):
    model, tokenizer = sharp(num_heads=2, dim=16, vocab_size=30), Letters()
    go, forward = threading.Event(), model.forward

    def failing_first(tokens, **options):
        if go.is_set() or tokens.shape[1] == 1:
            return forward(tokens, **options)
        go.wait(60)
        raise RuntimeError("no memory")

    monkeypatch.setattr(model, "forward", failing_first)
    (failed, a), (late, b), (left, c), (more, d) = (job(tokenizer, [1, 2]) for _ in range(4))
    with running(model, slots=1, queue=2) as engine:
        engine.submit([failed])
        while engine.waiting:
            time.sleep(0.01)
        engine.submit([late, left])
        with pytest.raises(BusyError, match="2 texts wait already: try again later"):
            engine.submit([more])
        late.deadline, left.abandoned = 0.0, True
        go.set()
        for tokens, error in ((a, RuntimeError), (b, TimeoutError), (c, ConnectionAbortedError)):
            with pytest.raises(error):
                tokens()
        engine.submit([more])
        assert len(d()) == 5
        assert (engine.running, [*engine.waiting]) == ([], [])


# --- HTTP -----------------------------------------------------------------------------------------


@contextmanager
def serving(model, exact=False, **options):
    """Serves a model in this process; yields its address."""
    with running(model, slots=3, exact=exact) as engine, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        app = Server("tiny", engine, ByteTokenizer(), **options).app()
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return sharp(num_heads=2, dim=16, vocab_size=256, context=200)


@pytest.fixture
def address(model):
    with serving(model, exact=True, template=Template()) as address:
        yield address


@pytest.fixture
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)


def test_openais_package_gets_what_stream_gives(client, model):
    assert [found.id for found in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    options = {"model": "tiny", "max_tokens": 9, "temperature": 0.7, "seed": 4}
    for prompt in ("hi", [104, 105]):
        whole = client.completions.create(prompt=prompt, n=2, logprobs=2, **options)
        for choice in whole.choices:
            generator = torch.Generator().manual_seed(4 + choice.index)
            about = {"max_new_tokens": 9, "temperature": 0.7, "logprobs": 2, "exact": True}
            pieces = [*fastgpt.stream(model, ByteTokenizer(), "hi", generator=generator, **about)]
            tokens = [token for piece in pieces for token in piece.tokens]
            assert (choice.text, choice.finish_reason) == ("".join(map(str, pieces)), "length")
            assert choice.logprobs.token_logprobs == [token.logprob for token in tokens]
            assert choice.logprobs.text_offset == [token.offset for token in tokens]
        assert whole.usage.to_dict() == {
            "prompt_tokens": 2, "completion_tokens": 18, "total_tokens": 20,
        }  # fmt: skip
    options |= {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = client.completions.create(prompt=["hi", "ho"], logprobs=0, **options)
    texts = ["".join(x.choices[0].text for x in parts if x.choices[0].index == i) for i in (0, 1)]
    assert texts[0] == whole.choices[0].text
    assert (last.choices, last.usage.total_tokens) == ([], 4 + 18)
    stop = texts[1][3:5]
    stopped = client.completions.create(
        model="tiny", prompt="ho", temperature=0.7, seed=5, stop=stop
    )
    [choice] = stopped.choices
    assert (choice.text, choice.finish_reason) == (texts[1].partition(stop)[0], "stop")
    full = client.completions.create(model="tiny", prompt="a" * 190, max_tokens=99).choices[0]
    assert full.finish_reason == "length"


def test_openais_package_can_chat(client):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    options = {"model": "tiny", "messages": messages, "seed": 2, "n": 2}
    options |= {"max_completion_tokens": 9, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**options)
    parts = [part.choices[0] for part in client.chat.completions.create(stream=True, **options)]
    for index, choice in enumerate(whole.choices):
        own = [part for part in parts if part.index == index]
        assert [part.delta.role for part in own] == ["assistant"] + [None] * (len(own) - 1)
        assert "".join(part.delta.content for part in own) == choice.message.content
        found = [token for part in own if part.logprobs for token in part.logprobs.content]
        assert found == choice.logprobs.content
        assert [len(token.top_logprobs) for token in found] == [2] * 9
        assert own[-1].finish_reason == choice.finish_reason == "length"
    prompt = Template(CHATML).render([{"role": "user", "content": "hi"}], answering=True)
    same = client.completions.create(model="tiny", prompt=prompt, seed=2, max_tokens=9)
    assert same.choices[0].text.strip() == whole.choices[0].message.content


def asked(address, content, path="/v1/completions", **headers):
    """Posts a request by hand; returns the status and the body."""
    headers = {"content-type": "application/json"} | {
        k.replace("_", "-"): v for k, v in headers.items()
    }
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    reply = httpx2.post(f"{address}{path}", content=body, headers=headers)
    return reply.status_code, reply.json()


REFUSED = {
    b"{": "JSON decode error",
    b"[]": "the request: Input should be",
    b"\xff": "error parsing the body",
    b'{"model": "tiny", "temperature": NaN}': "temperature: Input should be",
    b"[" * 10**5: "error parsing the body",
}
WRONG = {
    "no model": ({"model": "no"}, "there is no model 'no'"),
    "unknown": ({"echo": True}, "echo: Extra inputs are not permitted"),
    "ids": ({"prompt": [1, 256]}, "from 1 to 256: expected ids of the vocabulary, 0 to 255"),
    "empty": ({"prompt": []}, "prompt: Value should have at least 1 item"),
    "many": ({"prompt": ["a"] * 9, "n": 9}, "expected at most 64 texts in all"),
    "long": ({"prompt": "a" * 201}, "the prompt has 201 tokens: expected at most 200"),
    "type": ({"max_tokens": True}, "max_tokens: Input should be a valid integer"),
    "huge": ({"seed": 10**30}, "seed: Input should be less than"),
    "messages": ({"messages": [{"role": "tool", "content": "a"}]}, "messages: Input should be"),
    "answered": ({"messages": [{"role": "assistant", "content": "a"}]}, "the last message is an"),
}  # fmt: skip


@pytest.mark.parametrize("bad", [*REFUSED, *WRONG], ids=lambda bad: str(bad)[:20])
def test_what_is_wrong_is_said_in_openais_form(address, bad):
    change, said = WRONG.get(bad, (None, REFUSED.get(bad)))
    path = "/v1/chat/completions" if change and "messages" in change else "/v1/completions"
    status, body = asked(address, bad if change is None else {"model": "tiny", **change}, path)
    assert 400 <= status < 500
    assert said in body["error"]["message"]
    assert {*body["error"]} == {"message", "type", "param", "code"}


def test_who_may_ask(model, monkeypatch):
    monkeypatch.delenv("FASTGPT_TOKEN", raising=False)
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        with pytest.raises(UserError, match=r"other machines can reach: expected a token of your"):
            ServeConfig(model="x", host=host)
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    with serving(model, token="secret") as address:
        for given in ("", "Bearer secre", "Bearer secret2", "secret"):
            assert asked(address, body, authorization=given)[0] == 401
        assert asked(address, body, authorization="Bearer secret")[0] == 200
        status, found = asked(
            address,
            {"model": "tiny", "messages": [{"role": "user", "content": "a"}]},
            "/v1/chat/completions",
            authorization="Bearer secret",
        )
        assert (status, found["error"]["message"][:28]) == (400, "the model has no chat templa")
    with serving(model) as address:
        assert httpx2.post(f"{address}/v1/completions", content=bytes(2**22 + 1)).status_code == 413
        assert asked(address, body, host="evil.example")[0] == 403
        assert asked(address, body, content_type="text/plain")[0] == 400
        assert asked(address, body, "/v1/nothing")[1]["error"]["message"] == "Not Found"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_slots(address, stream):
    body = {"model": "tiny", "prompt": "a", "n": 4, "max_tokens": 199, "stream": stream}
    seen = []
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as client:
            data = json.dumps(body).encode()
            head = (
                f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
            )
            client.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + data)
            while not seen or seen[-1]["running"] < 3:
                seen.append(httpx2.get(f"{address}/health").json())
        start = time.monotonic()
        while seen[-1]["running"] or seen[-1]["waiting"]:
            seen.append(httpx2.get(f"{address}/health").json())
        assert time.monotonic() - start < 0.5  # three texts of 199 tokens take longer
