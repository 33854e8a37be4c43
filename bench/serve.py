"""Tries out serving under load on a CPU: `python -m bench.serve`.

A server of random weights runs in a process of its own. Measured are 16 clients at once beside one
after the other, and 50 for a while. Then come malformed requests, and clients that go away in the
middle. It fails where a client sees an error, such a request is not refused, or a slot is lost.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.request import urlopen

from fastgpt import flags
from fastgpt.checkpoint.tensors import in_memory
from fastgpt.config.recipes import RECIPES
from fastgpt.convert.source import OpenedModel
from fastgpt.convert.target import write_run
from fastgpt.data.tokenizers import ByteTokenizer
from fastgpt.errors import UserError, run_command
from fastgpt.model.gpt import GPT
from fastgpt.terminal import print_text

PORT = 8765
BODY = {"model": "run", "prompt": "ROMEO:", "max_tokens": 64, "temperature": 0.8}
BAD: dict[str, list[Any]] = {
    "model": ["no", 1], "prompt": [[], [[]], {}, [1, "a"], [999], "a" * 9999], "n": [0, 10**400],
    "temperature": [-1, "hot", float("nan")], "seed": [2**70], "stop": [5, ["a"] * 99],
    "max_tokens": [0, True], "logprobs": [-1, "a", True], "stream": ["yes"], "\ud800": ["\ud800"],
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeBench:
    """Tries out serving under load."""

    recipe: Literal["shakespeare-char", "baby"] = "shakespeare-char"
    """Recipe whose size the model has."""
    seconds: float = 60.0
    """Time for which 50 clients stream."""
    malformed: int = 1000
    """Number of malformed requests; a fifth as many clients go away in the middle."""


async def ask(content: Any, most: int = sys.maxsize) -> tuple[int, list[bytes]]:
    """Returns status and lines of an answer; hangs up after `most` lines."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    # by hand, because a library takes more of the server's cores
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    lines = []
    while len(lines) < most and (line := await reader.readline()):
        lines.append(line)
    writer.close()
    return int(lines[0].split()[1]), lines


async def streams(clients: int, seconds: float) -> float:
    """Returns tokens a second of clients that stream for a while."""
    start, answers = time.monotonic(), 0

    async def client() -> None:
        nonlocal answers
        while time.monotonic() < start + seconds:
            status, lines = await ask(BODY | {"stream": True})
            if status != 200 or b"data: [DONE]\n" not in lines:
                raise UserError(f"a client got {b''.join(lines[:1] + lines[-2:])!r}")
            answers += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    return round(answers * BODY["max_tokens"] / (time.monotonic() - start), 1)


async def time_serving(bench: ServeBench, pid: int) -> None:
    """Prints what is measured; raises `UserError` where the server fails."""
    for clients in (16, 1, 16, *[50] * 6):  # the first ones warm it up
        speed = await streams(clients, bench.seconds / 6)
        megabytes = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 >> 20
        print_text(f"{clients} at once: {speed} tokens a second, {megabytes} MB of memory")
    body, refused = json.dumps(BODY).encode(), set()
    bad = [BODY | {name: value} for name, values in BAD.items() for value in values]
    bad += [body[:size] for size in range(len(body))]
    for number in range(bench.malformed):
        refused.add((await ask(bad[number % len(bad)]))[0])
    for number in range(bench.malformed // 5):
        await ask(BODY | {"stream": True, "n": 2}, most=1 + number % 40)
    await asyncio.sleep(0.5)
    with urlopen(f"http://127.0.0.1:{PORT}/health") as reply:
        state = json.load(reply)
    print_text(f"malformed requests got {refused}; after clients have left: {state}")
    if state["running"] or state["waiting"] or any(not 400 <= status < 500 for status in refused):
        raise UserError("a request was not refused, or a slot is lost: see above")


def main(argv: list[str]) -> None:
    bench = flags.parse(ServeBench, argv, prog="python -m bench.serve")
    config = replace(RECIPES[bench.recipe][1].model, vocab_size=256, dropout=0.0)
    with tempfile.TemporaryDirectory() as folder:
        run, weights = Path(folder, "run"), in_memory(GPT.from_config(config).state_dict())
        write_run(OpenedModel(run, config, weights, ByteTokenizer()), run)
        command = f"{sys.executable} -m fastgpt.serve {run} --port {PORT} --precision fp32"
        with subprocess.Popen(command.split(), stderr=subprocess.PIPE) as server:
            next(iter(server.stderr or ()))  # it tells where it listens just before it does
            time.sleep(1)
            try:
                asyncio.run(time_serving(bench, server.pid))
            finally:
                server.terminate()


if __name__ == "__main__":
    run_command(main)
