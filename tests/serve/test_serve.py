"""Serving: texts that share a batch, OpenAI's interface by OpenAI's package, and the page."""

import json
import queue
import signal
import socket
import threading
import time
from contextlib import closing, contextmanager, suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import fastgpt
from fastgpt.data.tokenizers import ByteTokenizer
from fastgpt.errors import UserError
from fastgpt.kernels.decode_attention import op as decode_attention_op
from fastgpt.model.generation import draw
from fastgpt.sampling.streaming import GeneratedText
from fastgpt.sampling.templating import CHATML, Template
from tests.models import sharp
from tests.sampling.test_streaming import TOKENIZERS, Letters

openai = pytest.importorskip("openai")
httpx2 = pytest.importorskip("httpx2")  # which it brings
uvicorn = pytest.importorskip("uvicorn")
from pydantic import ValidationError  # noqa: E402

from fastgpt.serve import __main__ as serve_main  # noqa: E402 - what the extra installs
from fastgpt.serve import app  # noqa: E402
from fastgpt.serve.app import Server  # noqa: E402
from fastgpt.serve.generator import BatchGenerator, TextRequest  # noqa: E402


@pytest.fixture(autouse=True)
def _without_the_interpreter(monkeypatch):
    """Its products depend on the place of a row."""
    monkeypatch.setattr(decode_attention_op, "runs_kernels", lambda device: False)


def request(ids, new=5):
    """Returns a request, and the function that waits for its tokens."""
    events, ids = queue.Queue(), torch.tensor(ids)
    text = GeneratedText(Letters(), ids, max_new_tokens=new, temperature=0, logprobs=2)

    def tokens():
        piece, found = None, []
        while not piece or not piece.finish:
            piece = events.get(timeout=60)
            if isinstance(piece, Exception):
                raise piece
            found += piece.tokens
        return found

    return TextRequest(ids, text, events.put, time.monotonic() + 60, threading.Event()), tokens


ROTARY = {"position": "rotary", "window": 5, "num_kv_heads": 1}
DOCUMENTS = {"document_mask": True, "eot_id": 7}


@pytest.mark.parametrize(
    ("options", "mode"), [({}, "fp32"), (ROTARY, "exact"), (DOCUMENTS, "exact"), (ROTARY, "bf16")]
)
def test_greedy_texts_of_a_batch_are_those_of_each_alone(options, mode):
    """Without `exact`, a text may part where two tokens are nearly as likely."""
    model, exact = sharp(num_heads=2, dim=16, vocab_size=30, context=24, **options), mode == "exact"
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=mode == "bf16")
    prompts = [torch.randint(30, (n,)).tolist() for n in (1, 9, 3, 24, 2, 14, 5, 11, 1, 20)]
    with closing(BatchGenerator(model, slots=3, exact=exact, autocast=autocast)) as generator:
        requests = [request(ids, min(12, 25 - len(ids))) for ids in prompts]
        generator.submit([each for each, _ in requests])
        got = [tokens() for _, tokens in requests]
    for ids, tokens in zip(prompts, got):
        about = {"max_new_tokens": len(tokens), "temperature": 0, "logprobs": 2}
        with autocast():
            pieces = [*fastgpt.stream(model, Letters(), torch.tensor(ids), exact=exact, **about)]
        alone = [token for piece in pieces for token in piece.tokens]
        assert tokens == alone or not exact
        pairs = enumerate(zip(tokens, alone, strict=True))
        for first in [i for i, (a, b) in pairs if a.id != b.id][:1]:
            (_, best), (_, second) = alone[first].top
            assert best - second < 0.1
    assert not fastgpt.kernels.is_batch_invariant()


def test_the_queue_is_limited_and_texts_that_end_early_leave_no_trace():
    requests = [request([id]) for id in (1, 99, 1, 1, 1)]  # 99 is outside of the vocabulary
    (first, failed, late, left, more), go = (each for each, _ in requests), threading.Event()
    first.put = lambda piece: go.wait(60)
    model = sharp(num_heads=2, dim=16, vocab_size=30)
    with closing(BatchGenerator(model, slots=1, queue=3)) as generator:
        generator.submit([first])
        while generator.waiting:
            time.sleep(0.01)
        generator.submit([failed, late, left])
        with pytest.raises(queue.Full, match="3 texts wait"):
            generator.submit([more])
        late.deadline = 0.0
        left.gone.set()
        go.set()
        errors = (UserError, TimeoutError, ConnectionAbortedError)
        for (_, tokens), error in zip(requests[1:], errors):
            with pytest.raises(error):
                tokens()
        generator.submit([more])
        assert len(requests[4][1]()) == 5
        assert (generator.running, [*generator.waiting]) == ([], [])
    with pytest.raises(ConnectionAbortedError, match="the server ends"):
        generator.submit([])


def test_a_text_that_is_not_finite_ends_alone_and_leaves_its_slot_sound(capsys):
    model = sharp(num_heads=2, dim=16, vocab_size=31, tied=False)
    with torch.no_grad():
        model.wte.weight[30] = torch.nan  # which the tokenizer does not know, and no text draws
    texts = (([1], 9), ([30] * 12, 1), ([2], 9), ([3] * 5, 9))
    requests = [request(ids, new) for ids, new in texts]
    for each, _ in requests:
        each.text.draw = partial(draw, temperature=0.5)  # refuses NaN
    with closing(BatchGenerator(model, slots=2)) as generator:
        generator.submit([each for each, _ in requests])
        with pytest.raises(RuntimeError, match="nan"):
            requests[1][1]()
        assert [len(requests[i][1]()) for i in (0, 2, 3)] == [9, 9, 9]
    assert "RuntimeError" in capsys.readouterr().err


@contextmanager
def serving(model, exact=False, **options):
    """Serves a model in this process; yields its address."""
    making = closing(BatchGenerator(model, slots=3, exact=exact))
    with making as generator, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)  # a client's, too
        served = Server(name="tiny", generator=generator, tokenizer=ByteTokenizer(), **options)
        server = uvicorn.Server(served.http())
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


@pytest.fixture(scope="module")
def address(model):
    with serving(model, exact=True, template=Template()) as address:
        yield address


@pytest.fixture
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)


def test_openais_package_gets_what_stream_gives(client, model):
    assert [found.id for found in client.models.list()] == ["tiny"]
    tokenizer = ByteTokenizer()
    ask = partial(client.completions.create, model="tiny", temperature=0.7)
    whole = ask(prompt=["hi", [104, 111]], n=2, logprobs=2, max_tokens=9, seed=4)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (4, 36)
    for choice, prompt in zip(whole.choices, ("hi", "hi", "ho", "ho"), strict=True):
        about = {"max_new_tokens": 9, "temperature": 0.7, "logprobs": 2, "exact": True}
        about["generator"] = torch.Generator().manual_seed(4 + choice.index)
        pieces = [*fastgpt.stream(model, tokenizer, prompt, **about)]
        tokens = [token for piece in pieces for token in piece.tokens]
        assert (choice.text, choice.finish_reason) == ("".join(map(str, pieces)), "length")
        assert choice.logprobs.token_logprobs == [token.logprob for token in tokens]
        assert choice.logprobs.text_offset == [token.offset for token in tokens]
        assert [len(top) for top in choice.logprobs.top_logprobs] == [2] * 9
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = ask(prompt="hi", n=2, max_tokens=9, seed=4, logprobs=0, **options)
    for index, choice in enumerate(whole.choices[:2]):
        own = [part.choices[0] for part in parts if part.choices[0].index == index]
        assert "".join(part.text for part in own) == choice.text
        scores = [score for part in own for score in part.logprobs.token_logprobs]
        assert scores == choice.logprobs.token_logprobs
    assert (last.choices, last.usage.total_tokens) == ([], 2 + 18)
    stop = whole.choices[0].text[3:5]
    [cut] = ask(prompt="hi", seed=4, stop=stop).choices
    assert (cut.text, cut.finish_reason) == (whole.choices[0].text.partition(stop)[0], "stop")
    assert ask(prompt="a" * 190, max_tokens=99).choices[0].finish_reason == "length"


def test_openais_package_can_chat(client):
    ask = partial(client.chat.completions.create, model="tiny", seed=2, n=2, logprobs=True)
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    ask = partial(ask, messages=messages, max_completion_tokens=9, top_logprobs=2)
    parts = [part.choices[0] for part in ask(stream=True)]
    for index, choice in enumerate(ask().choices):
        own = [part for part in parts if part.index == index]
        assert [part.delta.role for part in own] == ["assistant"] + [None] * (len(own) - 1)
        assert "".join(part.delta.content for part in own) == choice.message.content
        found = [token for part in own if part.logprobs for token in part.logprobs.content]
        assert found == choice.logprobs.content
        assert [[len(x.bytes) for x in token.top_logprobs] for token in found] == [[1, 1]] * 9
        assert own[-1].finish_reason == choice.finish_reason == "length"
        prompt = Template(CHATML).render([{"role": "user", "content": "hi"}], answering=True)
        options = {"model": "tiny", "prompt": prompt, "max_tokens": 9, "seed": 2 + index}
        same = client.completions.create(**options).choices[0].text
        assert same.strip() == choice.message.content


@pytest.mark.parametrize(("kind", "ids"), [("bytes", b"a\xe2"), ("spaced", b"b\xe3"), ("bpe", b"")])
def test_parts_of_a_character_are_told_by_their_bytes(kind, ids):
    ids = ids or TOKENIZERS[kind].encode("a\u2713").tolist()[:2]
    found = [app.shown_token(TOKENIZERS[kind], id) for id in ids]
    assert found == [("a", b"a"), ("bytes:\\xe2", b"\xe2")]


def asked(address, content, path="/v1/completions", **headers):
    """Posts a request by hand; returns the status and the message of the error."""
    headers = {"content-type": "application/json"} | headers
    body = content if isinstance(content, bytes) else json.dumps({"model": "tiny"} | content)
    reply = httpx2.post(f"{address}{path}", content=body, headers=headers)
    error = reply.json().get("error", {"message": ""})
    assert reply.status_code == 200 or {*error} == {"message", "type", "param", "code"}
    return reply.status_code, error["message"]


USER = {"role": "user", "content": "a"}
WRONG = [
    (b"{", 400, "Invalid JSON"),
    (b"[" * 10**5, 400, "Invalid JSON"),
    (bytes(2**18 + 1), 413, "262,144"),
    ({"model": "no"}, 404, "'no': expected 'tiny'"),
    ({"echo": True}, 400, "echo: not supported"),
    ({"temperature": float("nan")}, 400, "temperature"),
    ({"prompt": [1, 256]}, 400, "256: expected ids of the vocabulary, 0 to 255"),
    ({"prompt": ["a"] * 9, "n": 9}, 400, "at most 64 texts"),
    ({"prompt": "a" * 201}, 400, "201 tokens: expected at most 200"),
    ({"messages": [USER | {"content": "a<|im_end|>"}]}, 400, "contains <|im_end|>"),
    ({"messages": [USER | {"role": "assistant"}]}, 400, "the last message"),
    ({"messages": [USER], "top_logprobs": 2}, 400, "logprobs"),
]


@pytest.mark.parametrize(("bad", "status", "said"), WRONG, ids=lambda x: str(x)[:30])
def test_what_is_wrong_is_said_in_openais_form(address, bad, status, said):
    path = "/v1/chat/completions" if "messages" in str(bad) else "/v1/completions"
    found = asked(address, bad, path)
    assert (found[0], said in found[1]) == (status, True), found


@pytest.mark.parametrize("fault", [{}, [{}] * 60_000])
def test_of_many_faults_one_is_described(fault):
    parts = {"messages": [{"role": "user", "content": [fault] * 60_000}]}
    for kind, body in ((app.Completion, {"prompt": [fault] * 60_000}), (app.Chat, parts)):
        for asks in (body, body | dict.fromkeys(map(str, range(20_000)), 1)):
            with pytest.raises(ValidationError) as error:
                kind.model_validate({"model": "tiny"} | asks)
            assert len(error.value.errors()) < 9


def test_who_may_ask(model):
    body = {"prompt": "a", "max_tokens": 1}
    with serving(model, token="secret") as address:
        for given in ("", "Bearer secre", "Bearer secret2", "secret"):
            assert asked(address, body, authorization=given)[0] == 401
        assert asked(address, body, authorization="Bearer secret")[0] == 200
    with serving(model) as address:
        assert asked(address, body, host="evil.example")[0] == 403
        assert asked(address, body, **{"content-type": "text/plain"})[0] == 415
        assert asked(address, body, "/v1/nothing") == (404, "Not Found")
        chat = asked(address, {"messages": [USER]}, "/v1/chat/completions")
        assert "has no chat template" in chat[1]


def test_signals_end_the_server_in_any_moment(model, monkeypatch, capfd):
    place, submit, replies = socket.create_server(("127.0.0.1", 0)), BatchGenerator.submit, []
    found = SimpleNamespace(known_tokenizer=ByteTokenizer, build_gpt=lambda _: model, hf_files={})
    monkeypatch.setattr(serve_main, "open_model", lambda _: found)
    monkeypatch.setattr(serve_main, "listening", lambda *_: place)

    def interrupted(generator, requests):
        with generator._changed:
            submit(generator, requests)
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(BatchGenerator, "submit", interrupted)
    about = f"http://127.0.0.1:{place.getsockname()[1]}", {"max_tokens": 199, "prompt": "a"}
    (client := threading.Thread(target=lambda: replies.append(asked(*about)))).start()
    with pytest.raises(KeyboardInterrupt):
        serve_main.main(["tiny", "--device", "cpu"])
    client.join(20)
    assert replies == [(503, "the server ends")]
    assert "Traceback" not in capfd.readouterr().err


IDLE = {"status": "ok", "running": 0, "waiting": 0}
GET, POST = (
    f"{x} HTTP/1.1\r\nHost: localhost\r\n" for x in ("GET /health", "POST /v1/completions")
)
LATE = [
    GET, f"{GET}\r\n{GET}", f"{POST}Content-Length: 999\r\n\r\n",
    f"{POST}Content-Type: application/json\r\nContent-Length: 999\r\n\r\n",
]  # fmt: skip


def test_a_client_that_owes_the_rest_keeps_no_connection(model, monkeypatch):
    monkeypatch.setattr(app, "PATIENCE", 2)  # a busy machine is slow to ask
    monkeypatch.setattr(app, "CONNECTIONS", len(LATE))
    with serving(model) as address:
        place = "127.0.0.1", int(address.rpartition(":")[2])
        clients = [socket.create_connection(place, 20) for _ in LATE]
        for client, text in zip(clients, LATE):
            client.sendall(text.encode())
        with socket.create_connection(place, 20) as client:  # one too many
            assert b" 503 " in client.recv(99)
        ends = time.monotonic() + 20
        while clients and time.monotonic() < ends:
            time.sleep(0.01)
            client = clients.pop(0)
            with suppress(ConnectionError):
                client.sendall(b"x")  # it goes on, but slowly
                clients.append(client)
        assert not clients
        with socket.create_connection(place, 20) as client:
            client.sendall(GET.encode() + b"x" * 2**14)
            assert b" 400 " in client.recv(99)


def test_a_client_that_does_not_read_loses_its_connection(model, monkeypatch):
    monkeypatch.setattr(app, "PATIENCE", 0.3)
    asks = {"model": "tiny", "prompt": "a", "n": 3, "max_tokens": 199, "logprobs": 20}
    with serving(model) as address:
        ask = partial(httpx2.stream, "POST", f"{address}/v1/completions")
        with ask(json=asks | {"stream": True}) as reply:
            while httpx2.get(f"{address}/health").json() != IDLE:
                time.sleep(0.02)
            time.sleep(1)
            with pytest.raises(httpx2.RemoteProtocolError):
                reply.read()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_slots(address, model, stream):
    data = json.dumps({"model": "tiny", "prompt": "a", "n": 4, "max_tokens": 199, "stream": stream})
    head = LATE[3].replace("999", str(len(data)))
    steps, place = [], ("127.0.0.1", int(address.rpartition(":")[2]))
    with model.register_forward_pre_hook(lambda *_: steps.append(1)):
        for _ in range(3):
            with socket.create_connection(place) as client:
                client.sendall(f"{head}{data}".encode())
                while httpx2.get(f"{address}/health").json()["running"] < 3:
                    pass
            while httpx2.get(f"{address}/health").json() != IDLE:
                pass
    assert len(steps) < 3 * 199  # the fourth text of each would have to wait for so many
