"""Serves a model: `python -m fastgpt.serve MODEL`, for OpenAI's clients and for browsers."""

import os
import socket
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fastgpt import flags
from fastgpt.commands import install_command
from fastgpt.config.checks import Range, check_fields
from fastgpt.convert.source import open_model
from fastgpt.device import device
from fastgpt.errors import UserError, reason, run_command
from fastgpt.sampling.chat import template_of
from fastgpt.terminal import print_line


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Serves a model over HTTP, with OpenAI's interface and a page for browsers."""

    model: Annotated[str, tyro.conf.Positional]
    """Model to serve: whatever fastgpt.load takes, such as a run or a folder of Hugging Face."""
    host: str = "127.0.0.1"
    """Address to listen on. One that other machines can reach needs a token in the environment
    variable FASTGPT_TOKEN, which clients send as their API key."""
    port: Annotated[int, Range("1 to 65535", lambda x: 1 <= x <= 65535)] = 8000
    """Port to listen on."""
    slots: Annotated[int, Range("1 to 1,024", lambda x: 1 <= x <= 1024)] = 16
    """Number of texts that are generated at once; the cache of each is as long as the context."""
    exact: bool = False
    """Computation in which a text does not depend on the others of the batch."""
    device: Literal["auto", "cuda", "xpu", "mps", "cpu"] = "auto"
    """Device to run on: cuda, cpu, or auto to choose. `auto` uses CUDA if it is available."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Precision of the matrix products. `auto` uses bf16 where the hardware multiplies it."""

    def __post_init__(self) -> None:
        check_fields(self)
        local = self.host in ("localhost", "127.0.0.1", "::1")
        if not local and not os.environ.get("FASTGPT_TOKEN"):
            raise UserError(
                f"--host is {self.host}, which other machines can reach: expected a token of your"
                " choice in the environment variable FASTGPT_TOKEN"
            )
        if not os.environ.get("FASTGPT_TOKEN", "").isascii():
            raise UserError("FASTGPT_TOKEN has other characters than ASCII, as HTTP expects them")


def listening(host: str, port: int) -> socket.socket:
    """Opens the socket, before a model is loaded for nothing."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(f"--host is {host}, --port is {port}: {reason(error)}") from error


def main(argv: list[str]) -> None:
    """Runs the command line `argv`."""
    config = flags.command(ServeConfig, argv, prog="python -m fastgpt.serve")
    try:
        import uvicorn

        from fastgpt.serve.app import Server
        from fastgpt.serve.generator import BatchGenerator
    except ImportError as error:
        how = install_command("serve", "fastapi", "uvicorn")
        raise UserError(f"serving needs {error.name}: {how}") from error
    place = listening(config.host, config.port)
    on = device.pick_device(config.device, "--device")
    precision = device.pick_precision(config.precision, on, "--precision")
    found = open_model(config.model)
    tokenizer = found.known_tokenizer()
    model, autocast = found.build_gpt(on), partial(device.autocast, on, precision)
    generator = BatchGenerator(model, slots=config.slots, exact=config.exact, autocast=autocast)
    server = Server(
        name=Path(config.model).resolve().name, generator=generator, tokenizer=tokenizer,
        template=template_of(found.hf_files), token=os.environ.get("FASTGPT_TOKEN"),
    )  # fmt: skip
    host = f"[{config.host}]" if ":" in config.host else config.host
    print_line(f"serving {server.name} at http://{host}:{config.port}")

    class Closing(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            generator.closed = True  # ends the texts, for which the connections would wait
            if not self.should_exit:  # it ends within seconds: a second signal would only tear it
                super().handle_exit(sig, frame)

    with closing(generator):
        Closing(server.http()).run(sockets=[place])


if __name__ == "__main__":
    run_command(main)
