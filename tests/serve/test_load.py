"""Serving under load: many clients at once, and among them those that are wrong or that leave."""

import asyncio
import json
import sys

import pytest

from tests.serve.test_serve import IDLE, POST, _without_the_interpreter, httpx2, model, serving  # noqa: F401 - fixtures

pytestmark = pytest.mark.slow
BODY = {"model": "tiny", "prompt": "ROMEO:", "max_tokens": 64, "temperature": 0, "stream": True}
BAD = {
    "model": ["no", 1], "prompt": [[], [[]], {}, [1, "a"], [999], "a" * 9999], "n": [0, 10**400],
    "temperature": [-1, "hot", float("nan")], "seed": [2**70], "stop": [5, ["a"] * 99],
    "max_tokens": [0, True], "logprobs": [-1, "a", True], "stream": ["yes"], "\ud800": ["\ud800"],
}  # fmt: skip


async def ask(port: int, body: bytes, most: int = sys.maxsize) -> tuple[int, str]:
    """Returns the status and the text of an answer; hangs up after `most` lines."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{POST}Connection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    lines = []
    while len(lines) < most and (line := await reader.readline()):
        lines.append(line.decode().removeprefix("data: ").strip())
    writer.close()
    pieces = [json.loads(line) for line in lines if line.startswith('{"id"')]
    text = "".join(piece["choices"][0]["text"] for piece in pieces)
    return int(lines[0].split()[1]), text + "[DONE]" * ("[DONE]" in lines)


async def load(port: int) -> list[list[tuple[int, str]]]:
    """Returns what malformed requests got, those who left, and 50 clients meanwhile."""
    body, twice = json.dumps(BODY).encode(), json.dumps(BODY | {"n": 2}).encode()
    wrong = [json.dumps(BODY | {name: bad}).encode() for name in BAD for bad in BAD[name]]

    async def client(*asks: tuple) -> list[tuple[int, str]]:
        return [await ask(port, *each) for each in asks]

    malformed = client(*((bad,) for bad in (*wrong, *(body[:size] for size in range(len(body))))))
    leaves = client(*((twice, 1 + lines) for lines in range(40)))
    return await asyncio.gather(malformed, leaves, *(client((body,), (body,)) for _ in range(50)))


def test_all_get_whole_answers_beside_those_who_are_wrong_or_leave(model):  # noqa: F811
    with serving(model, exact=True) as address:
        port = int(address.rpartition(":")[2])
        alone = asyncio.run(ask(port, json.dumps(BODY).encode()))
        refused, _, *answers = asyncio.run(load(port))
        assert (alone[0], alone[1].endswith("[DONE]")) == (200, True)
        assert answers == [[alone] * 2] * 50
        assert {status // 100 for status, _ in refused} == {4}
        while httpx2.get(f"{address}/health").json() != IDLE:
            pass
