"""The HTTP interface, which is OpenAI's: models, completions and chat completions."""

import asyncio
import json
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Full
from typing import Annotated, Any, Literal

import torch
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from torch import Tensor
from uvicorn.protocols.http.h11_impl import H11Protocol

from fastgpt.data.tokenizers import Tokenizer
from fastgpt.errors import UserError, shown
from fastgpt.model.generation import OPTIONS, check_tokens
from fastgpt.sampling.chat import Template, encode, refuse_special
from fastgpt.sampling.streaming import GeneratedText, TextDelta
from fastgpt.sampling.text import encode_prompt
from fastgpt.serve.generator import BatchGenerator, TextRequest
from fastgpt.terminal import REPLACEMENT

Id = Annotated[int, Field(ge=0, lt=2**31)]
FIRST_FAULT = Field(fail_fast=True)
"""Each further fault would take time to describe."""
Ids = Annotated[list[Id], FIRST_FAULT]
LONGEST_BODY = 2**18
"""Bytes of the longest request."""
MOST = 64
"""Most texts of a request, prompts times `n`, and most fields of an object."""
SECONDS = 600.0
"""Time after which a request is ended."""
CONNECTIONS = 500
"""Most connections, fewer than the files that a process may usually open."""
PATIENCE = 20.0
"""Seconds for which a client may owe a header or a body, or not read; at most twice that."""
LOCAL = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.I)
"""Hosts that answer without a token: another name in a browser may lead to this machine, too."""
STATUSES = {
    UserError: 400, ValidationError: 400, ClientDisconnect: 400, Full: 429, OSError: 503,
    Exception: 500,
}  # fmt: skip
PAGE = Path(__file__).with_name("page.html")


class StrictModel(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """Object of a request; null stands for a field's default, and unknown fields are refused."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if len(given) > MOST:
            raise ValueError(f"expected at most {MOST} fields")
        return {name: value for name, value in given.items() if value is not None}


def _several(given: Any) -> Any:
    """Returns a text, or its ids, as a list of one."""
    ids = isinstance(given, list) and given and isinstance(given[0], int)
    return [given] if ids or isinstance(given, str) else given


class StreamOptions(StrictModel):
    include_usage: bool = False


class Asked(StrictModel):
    """Fields of both kinds of requests."""

    model: str
    n: int = Field(1, ge=1, le=MOST)
    seed: int = Field(default_factory=partial(secrets.randbelow, 2**62), ge=0, lt=2**62)
    stop: Annotated[list[str], BeforeValidator(_several), Field(max_length=16)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.1, le=10)
    # accepted, because they change nothing
    user: str = ""
    frequency_penalty: float = Field(0, ge=0, le=0)
    presence_penalty: float = Field(0, ge=0, le=0)


UNSUPPORTED = ("frequency_penalty", "presence_penalty")
"""Fields that are refused unless they change nothing."""


class Completion(Asked):
    prompt: Annotated[list[str | Ids], FIRST_FAULT, BeforeValidator(_several)] = Field(
        [""], min_length=1, max_length=MOST
    )
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class Message(StrictModel):
    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[TextPart], FIRST_FAULT]


class Chat(Asked):
    messages: Annotated[list[Message], FIRST_FAULT] = Field(min_length=1, max_length=256)
    max_tokens: int | None = Field(
        None, ge=1, validation_alias=AliasChoices("max_tokens", "max_completion_tokens")
    )
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)


Either = Completion | Chat
TextDeltas = AsyncIterator[tuple[int, TextDelta]]


def as_json(content: Any, status: int = 200) -> Response:
    # in ASCII, because a tokenizer may know halves of surrogate pairs, which UTF-8 does not
    return Response(json.dumps(content), status, media_type="application/json")


async def as_error(_: Any, error: Exception) -> Response:
    """Returns an error in OpenAI's form."""
    status = next(status for kind, status in STATUSES.items() if isinstance(error, kind))
    if isinstance(error, HTTPException):
        said, status = error.detail, error.status_code
    elif isinstance(error, ValidationError):
        first = error.errors()[0]
        name, said = (*first["loc"], "the request")[0], first["msg"]
        if first["type"] == "extra_forbidden" or name in UNSUPPORTED:
            name, said = first["loc"][-1], "not supported"
        said = f"{name}: {said}"
    else:
        said = str(error) or type(error).__name__
    kind = "invalid_request_error" if status < 500 else "server_error"
    content = {"message": said, "type": kind, "param": None, "code": None}
    return as_json({"error": content}, status)


class Connection(H11Protocol):
    """Connection by h11, which limits a header to 16 KiB; it ends if its client stands still."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._check()
        if len(self.connections) > CONNECTIONS:
            transport.write(b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\n\r\n")
            transport.close()

    def _check(self, before: object = None) -> None:
        """Ends the connection if the client owes what it owed before, else waits once more."""
        cycle, unread = self.cycle, self.transport.get_write_buffer_size()
        state = (cycle, cycle and (cycle.response_complete, cycle.more_body), unread)
        if state == before and (not cycle or any(state[1]) or self.flow.write_paused):
            self.transport.abort()
        elif unread or not self.transport.is_closing():
            self.loop.call_later(PATIENCE, self._check, state)


@dataclass(kw_only=True)
class Server:
    """A model that is served, and its answers to requests."""

    name: str
    generator: BatchGenerator
    tokenizer: Tokenizer
    template: Template | None = None
    token: str | None = None
    """Token that clients must send as `Authorization: Bearer`; None: they need none."""

    def http(self) -> uvicorn.Config:
        """Returns the interface with the settings of its server."""
        return uvicorn.Config(
            self.app(), http=Connection, ws="none", log_level="warning",
            timeout_graceful_shutdown=3,
        )  # fmt: skip

    def app(self) -> FastAPI:
        """Returns the interface."""
        handlers: dict[Any, Any] = dict.fromkeys((HTTPException, *STATUSES), as_error)
        app = FastAPI(openapi_url=None, exception_handlers=handlers)
        api = APIRouter(prefix="/v1", dependencies=[Depends(self._admit)])
        for path, kind in (("/completions", Completion), ("/chat/completions", Chat)):
            api.add_api_route(path, partial(self._answer, kind), methods=["POST"])
        model = {
            "id": self.name, "object": "model", "created": int(time.time()), "owned_by": "fastgpt",
            "context": self.generator.model.config.context, "chat": self.template is not None,
        }  # fmt: skip
        api.add_api_route("/models", lambda: as_json({"object": "list", "data": [model]}))
        app.add_api_route("/health", self._health)
        app.add_api_route("/", lambda: FileResponse(PAGE))
        app.include_router(api)
        return app

    async def _admit(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if self.token and not secrets.compare_digest(given, f"Bearer {self.token}".encode()):
            raise HTTPException(401, "expected the header Authorization: Bearer TOKEN")
        if not self.token and not LOCAL.fullmatch(request.headers.get("host", "")):
            raise HTTPException(403, "expected localhost in the header Host")

    async def _health(self) -> Response:
        counts = {"running": len(self.generator.running), "waiting": len(self.generator.waiting)}
        return as_json({"status": "ok", **counts})

    async def _answer(self, kind: type[Either], request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise HTTPException(415, "expected the header Content-Type: application/json")
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > LONGEST_BODY:
                raise HTTPException(413, f"expected at most {LONGEST_BODY:,} bytes")
        asked = kind.model_validate_json(body)
        if asked.model != self.name:
            said = f"there is no model {shown(asked.model)}: expected {self.name!r}"
            raise HTTPException(404, said)
        events, loop = asyncio.Queue(), asyncio.get_running_loop()

        def put(*event: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(events.put_nowait, event)

        requests = await asyncio.to_thread(self._requests, asked, put)
        self.generator.submit(requests)
        hung_up = asyncio.ensure_future(request.receive())  # what follows the body
        hung_up.add_done_callback(lambda _: requests[0].gone.set())
        pieces = _deltas(events, len(requests), hung_up)
        chunk = ".chunk" if asked.stream else ""
        about = {
            "id": secrets.token_hex(16), "created": int(time.time()), "model": asked.model,
            "object": f"chat.completion{chunk}" if kind is Chat else "text_completion",
        }  # fmt: skip
        if asked.stream:
            lines = self._events(asked, about, requests, pieces)
            return StreamingResponse(lines, media_type="text/event-stream")
        texts = [TextDelta("", [])] * len(requests)
        async for index, piece in pieces:
            texts[index] += piece
        choices = [self._choice(asked, *each, role="assistant") for each in enumerate(texts)]
        return as_json(about | {"choices": choices, "usage": usage(asked, requests)})

    def _requests(self, asked: Either, put: Callable[..., None]) -> list[TextRequest]:
        """Encodes the prompts of a request; `n` texts of the first come first."""
        config, requests, gone = self.generator.model.config, [], threading.Event()
        options = asked.model_dump(include={*OPTIONS})
        if isinstance(asked, Chat):
            if self.template is None:
                raise UserError("the model has no chat template: expected /v1/completions")
            prompts = [_conversation(asked, self.tokenizer, self.template)]
            stop = [*asked.stop, self.template.end_of_turn()]
            options |= {"stop": stop, "logprobs": asked.top_logprobs, "strip": True}
        else:
            if len(asked.prompt) * asked.n > MOST:
                raise UserError(f"n: expected at most {MOST} texts in all")
            prompts = [
                encode_prompt(x, self.tokenizer) if isinstance(x, str) else torch.tensor(x)
                for x in asked.prompt
            ]
            options |= {"stop": asked.stop, "logprobs": asked.logprobs or 0}
        for ids in (ids for ids in prompts for _ in range(asked.n)):
            check_tokens(ids[None], config)
            room = config.context + 1 - len(ids)
            if room < 1:
                found, most = len(ids), config.context
                raise UserError(f"the prompt has {found:,} tokens: expected at most {most:,}")
            options["generator"] = torch.Generator().manual_seed(asked.seed + len(requests))
            options["max_new_tokens"] = min(asked.max_tokens or room, room)
            text, ends = GeneratedText(self.tokenizer, ids, **options), time.monotonic() + SECONDS
            requests.append(TextRequest(ids, text, partial(put, len(requests)), ends, gone))
        return requests

    async def _events(
        self, asked: Either, about: dict[str, Any], requests: list[TextRequest], pieces: TextDeltas
    ) -> AsyncIterator[str]:
        """Yields an answer as server-sent events."""

        def event(choices: list[dict[str, Any]], **more: Any) -> str:
            return f"data: {json.dumps(about | {'choices': choices} | more)}\n\n"

        try:
            if isinstance(asked, Chat):
                for index in range(asked.n):
                    yield event([self._choice(asked, index, TextDelta("", []), role="assistant")])
            async for index, piece in pieces:
                if piece.text or piece.finish:
                    yield event([self._choice(asked, index, piece)])
            if asked.stream_options.include_usage:
                yield event([], usage=usage(asked, requests))
            yield "data: [DONE]\n\n"
        except Exception as error:  # the status has been sent
            yield f"data: {bytes((await as_error(None, error)).body).decode()}\n\n"

    def _choice(self, asked: Either, index: int, piece: TextDelta, **role: str) -> dict[str, Any]:
        """Returns a piece, or a whole text, in OpenAI's form."""
        tokens, logprobs, decode = piece.tokens, None, partial(shown_token, self.tokenizer)

        def entry(id: int, logprob: float) -> dict[str, Any]:
            token, data = decode(id)
            return {"token": token, "logprob": logprob, "bytes": [*data]}

        if isinstance(asked, Chat):
            said = {"delta" if asked.stream else "message": role | {"content": piece.text}}
            if asked.logprobs:
                tops = ({"top_logprobs": [entry(*top) for top in x.top]} for x in tokens)
                scored = [entry(x.id, x.logprob) | top for x, top in zip(tokens, tops)]
                logprobs = {"content": scored}
        else:
            said = {"text": piece.text}
            if asked.logprobs is not None:
                logprobs = {
                    "tokens": [decode(x.id)[0] for x in tokens],
                    "token_logprobs": [x.logprob for x in tokens],
                    "top_logprobs": [{decode(id)[0]: y for id, y in x.top} for x in tokens],
                    "text_offset": [x.offset for x in tokens],
                }
        return {"index": index, "finish_reason": piece.finish, "logprobs": logprobs, **said}


def shown_token(tokenizer: Tokenizer, id: int) -> tuple[str, bytes]:
    """Returns the text of a token, `bytes:\\xe2` for a part of a character, and its bytes."""
    text, data = tokenizer.decode([id]), tokenizer.token_bytes(id)
    return f"bytes:{repr(data)[2:-1]}" if REPLACEMENT in text else text, data


def _conversation(asked: Chat, tokenizer: Tokenizer, template: Template) -> Tensor:
    """Returns the ids of a conversation, which ends where the answer begins."""
    if asked.top_logprobs and not asked.logprobs:
        raise UserError("top_logprobs: expected logprobs, too")
    if asked.messages[-1].role == "assistant":
        raise UserError("the last message is an answer: expected a question")
    said = [
        {"role": x.role, "content": "".join(y if isinstance(y, str) else y.text for y in x.content)}
        for x in asked.messages
    ]
    refuse_special(tokenizer, template, said)
    return torch.from_numpy(encode(tokenizer, template.pieces(said))[0])


def usage(asked: Asked, requests: list[TextRequest]) -> dict[str, int]:
    read = sum(len(request.prompt) for request in requests[:: asked.n])
    drawn = sum(request.length + 1 - len(request.prompt) for request in requests)
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


async def _deltas(events: asyncio.Queue, left: int, hung_up: asyncio.Future) -> TextDeltas:
    """Yields the pieces of all texts as they come, with their numbers."""
    try:
        while left:
            index, found = await events.get()
            if isinstance(found, Exception):
                raise found
            left -= found.finish is not None
            yield index, found
    finally:
        hung_up.cancel()
