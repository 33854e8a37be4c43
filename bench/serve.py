"""Tries out serving under load on a CPU: `python -m bench.serve`.

A server of random weights, of the size of a recipe, runs in a process of its own. Measured are 16
clients at once beside one after the other, many streaming clients for a while, malformed requests,
and clients that go away in the middle. The command fails where a client sees an error, a malformed
request is not refused, or a slot is lost.
"""

import asyncio
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from fastgpt import flags
from fastgpt.checkpoint.tensors import in_memory
from fastgpt.config.checks import POSITIVE, check_fields
from fastgpt.config.recipes import RECIPES
from fastgpt.convert.source import OpenedModel
from fastgpt.convert.target import write_run
from fastgpt.data.tokenizers import ByteTokenizer
from fastgpt.errors import UserError, run_command
from fastgpt.model.gpt import GPT
from fastgpt.terminal import print_text

BODY = {"model": "run", "prompt": "ROMEO:", "max_tokens": 64, "temperature": 0.8}
BAD: dict[str, list[Any]] = {
    "model": ["no", 1, []], "prompt": [[], [[]], {}, 5, True, [1, "a"], [999], [-1], "a" * 9999],
    "max_tokens": [0, -1, "9", 1.5, True, []], "n": [0, 65, "1", 1e9, {}, 10**400],
    "temperature": [-1, 101, "hot", [], float("nan"), float("inf")], "top_p": [0, 2, "1", {}],
    "top_k": [0, -3, 1.5], "min_p": [-1, 2], "repetition_penalty": [0, -1, 99],
    "seed": [-1, 2**70, "x", 1.5], "stop": [5, [1], {}, ["a"] * 99], "stream": [1, "yes", {}],
    "stream_options": [1, [], {"x": 1}], "logprobs": [-1, 21, "a", True], "echo": [True],
    "frequency_penalty": [1], "logit_bias": [{"5": 1}], "messages": [[]], "\ud800": ["\ud800"],
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeBench:
    """Tries out serving under load."""

    recipe: str = "shakespeare-char"
    """Recipe whose size the model has."""
    seconds: Annotated[float, POSITIVE] = 60.0
    """Time for which clients stream."""
    clients: Annotated[int, POSITIVE] = 50
    """Number of clients that stream at once."""
    malformed: Annotated[int, POSITIVE] = 1000
    """Number of malformed requests."""
    leaving: Annotated[int, POSITIVE] = 200
    """Number of clients that go away in the middle."""
    port: Annotated[int, POSITIVE] = 8765
    """Port of the server."""

    def __post_init__(self) -> None:
        check_fields(self)


class Client:
    """HTTP by hand, which takes less of the server's cores than a library."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def ask(self, content: Any, *, leave_after: int | None = None, **raw: Any) -> Any:
        """Sends a request; returns status and body, or None if it left after so many lines."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        head = {"method": "POST", "path": "/v1/completions", "type": "application/json"} | raw
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(
            f"{head['method']} {head['path']} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: {head['type']}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        lines = []
        while line := await reader.readline():
            lines.append(line)
            if leave_after is not None and len(lines) > leave_after:
                break
        writer.close()
        return None if leave_after is not None else (int(lines[0].split()[1]), lines)

    async def health(self) -> dict[str, Any]:
        _, lines = await self.ask(b"", method="GET", path="/health")
        return json.loads(lines[-1])


def malformed(draw: random.Random) -> tuple[Any, dict[str, Any]]:
    """Returns a request that must be refused, and what differs in its first lines."""
    name = draw.choice([*BAD, "json", "bytes", "path", "method", "type"])
    if name in BAD:
        return BODY | {name: draw.choice(BAD[name])}, {}
    text = json.dumps(BODY).encode()
    cut = draw.randrange(len(text))
    return {
        "json": (text[:cut], {}), "bytes": (draw.randbytes(cut), {}),
        "path": (text, {"path": f"/v1/{cut}"}), "method": (text, {"method": "PUT"}),
        "type": (text, {"type": "text/plain"}),
    }[name]  # fmt: skip


async def measure(bench: ServeBench, pid: int) -> dict[str, Any]:
    client, found = Client(bench.port), {}

    def megabytes() -> int:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize() >> 20

    async def timed(together: int, requests: int) -> float:
        """Returns the tokens per second of requests, so many of them at once."""
        turns, start = asyncio.Semaphore(together), time.monotonic()

        async def one() -> None:
            async with turns:
                status, lines = await client.ask(BODY | {"stream": True})
                assert status == 200, lines

        await asyncio.gather(*(one() for _ in range(requests)))
        return requests * BODY["max_tokens"] / (time.monotonic() - start)

    await timed(16, 16)
    found["tokens/s, 1 client"] = round(await timed(1, 16), 1)
    found["tokens/s, 16 clients"] = round(await timed(16, 96), 1)
    counts, memory, ends = Counter[int](), [], time.monotonic() + bench.seconds

    async def streams() -> None:
        while time.monotonic() < ends:
            status, lines = await client.ask(BODY | {"stream": True})
            whole = any(line.startswith(b"data: [DONE]") for line in lines)
            counts[status if whole else -1] += 1

    async def watch() -> None:
        while time.monotonic() < ends:
            await asyncio.sleep(bench.seconds / 6)
            memory.append(megabytes())

    await asyncio.gather(watch(), *(streams() for _ in range(bench.clients)))
    found |= {"answers by status": dict(counts), "MB of memory, in turn": memory}
    draw, refused = random.Random(0), Counter[int]()
    for _ in range(bench.malformed):
        content, head = malformed(draw)
        refused[(await client.ask(content, **head))[0]] += 1
    found["malformed requests by status"] = dict(refused)
    for _ in range(bench.leaving):
        await client.ask(BODY | {"stream": True, "n": 2}, leave_after=draw.choice([0, 8, 15, 40]))
    await asyncio.sleep(0.5)
    found["after clients have left"] = await client.health()
    found["MB of memory at the end"] = megabytes()
    found["all is well"] = (
        {*counts} == {200}
        and all(400 <= status < 500 for status in refused)
        and found["after clients have left"] == {"status": "ok", "running": 0, "waiting": 0}
    )
    return found


def main(argv: list[str]) -> None:
    bench = flags.parse(ServeBench, argv, prog="python -m bench.serve")
    if bench.recipe not in RECIPES:
        raise UserError(f"--recipe is {bench.recipe}: expected a recipe")
    config = replace(RECIPES[bench.recipe][1].model, vocab_size=256, dropout=0.0)
    with tempfile.TemporaryDirectory() as folder:
        run, weights = Path(folder, "run"), in_memory(GPT.from_config(config).state_dict())
        write_run(OpenedModel(run, config, weights, ByteTokenizer()), run)
        command = [sys.executable, "-m", "fastgpt.serve", str(run), "--port", str(bench.port)]
        server = subprocess.Popen([*command, "--precision", "fp32"], stderr=subprocess.PIPE)
        assert server.stderr is not None
        server.stderr.readline()
        time.sleep(1)
        try:
            found = asyncio.run(measure(bench, server.pid))
        finally:
            server.terminate()
            server.wait()
    for name, value in found.items():
        print_text(f"{name:30} {value}")
    if not found["all is well"]:
        raise UserError("the server did not keep what it promises: see above")


if __name__ == "__main__":
    run_command(main)
