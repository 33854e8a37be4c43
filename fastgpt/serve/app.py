"""The HTTP interface, which is OpenAI's: models, completions and chat completions."""

import asyncio
import hmac
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as StarletteError
from torch import Tensor

from fastgpt.data.tokenizers import Tokenizer
from fastgpt.errors import UserError
from fastgpt.model.generation import check_tokens
from fastgpt.sampling.chat import Template, encode, refuse_special
from fastgpt.sampling.streaming import Continuation, Piece, Token
from fastgpt.sampling.text import encode_prompt
from fastgpt.serve.engine import BusyError, Engine, Job
from fastgpt.terminal import REPLACEMENT

LONGEST_BODY = 2**22
"""Bytes of the longest request."""
MOST = 64
"""Most texts of a request: prompts times `n`."""
LOCAL = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.I)
"""Hosts that answer without a token: another name in a browser may lead to this machine, too."""
ERRORS = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}

# --- requests -------------------------------------------------------------------------------------


class Fields(BaseModel):
    """Object of a request; null stands for a field's default, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        pairs = given.items() if isinstance(given, dict) else ()
        return {name: x for name, x in pairs if x is not None} if pairs else given


class StreamOptions(Fields):
    include_usage: bool = False


class Asked(Fields):
    """Fields of both kinds of requests."""

    model: str
    n: int = Field(1, ge=1, le=MOST)
    seed: int | None = Field(None, ge=0, lt=2**62)
    stop: str | Annotated[list[str], Field(max_length=16)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.1, le=10)
    user: str = ""
    # accepted where they change nothing
    frequency_penalty: float = Field(0, ge=0, le=0)
    presence_penalty: float = Field(0, ge=0, le=0)
    logit_bias: dict[str, float] = Field({}, max_length=0)

    def options(self, index: int) -> dict[str, Any]:
        """Returns the options of the `Continuation` number `index`."""
        generator = torch.Generator()
        generator.seed() if self.seed is None else generator.manual_seed(self.seed + index)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return {x: getattr(self, x) for x in names} | {"generator": generator, "stop": stop}


Id = Annotated[int, Field(ge=0, lt=2**31)]


class Completion(Asked):
    prompt: str | list[Id] | list[str] | list[list[Id]] = ""
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)

    def prompts(self, server: "Server") -> list[Tensor]:
        several = isinstance(self.prompt, list) and not isinstance((*self.prompt, "")[0], int)
        return [
            encode_prompt(x, server.tokenizer) if isinstance(x, str) else torch.tensor(x)
            for x in (self.prompt if several else [self.prompt])
        ]


class TextPart(Fields):
    type: Literal["text"]
    text: str


class Message(Fields):
    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]
    name: str = ""

    def plain(self) -> dict[str, str]:
        parts = [self.content] if isinstance(self.content, str) else [x.text for x in self.content]
        return {"role": self.role, "content": "".join(parts)}


class Chat(Asked):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    def prompts(self, server: "Server") -> list[Tensor]:
        if server.template is None:
            raise refusal(400, "the model has no chat template: expected /v1/completions", "model")
        messages = [message.plain() for message in self.messages]
        if messages[-1]["role"] == "assistant":
            raise refusal(400, "the last message is an answer: expected a question", "messages")
        refuse_special(server.tokenizer, messages)
        return [torch.from_numpy(encode(server.tokenizer, server.template.pieces(messages))[0])]


# --- answers --------------------------------------------------------------------------------------


def refusal(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> HTTPException:
    """Returns the exception that is answered with OpenAI's form of an error."""
    detail: Any = {"message": message, "type": ERRORS.get(status, "invalid_request_error")}
    return HTTPException(status, detail | {"param": param, "code": code})


def as_json(content: Any, status: int = 200) -> Response:
    # in ASCII, because a tokenizer may know halves of surrogate pairs, which UTF-8 does not
    return Response(json.dumps(content), status, media_type="application/json")


def as_error(_: Request, error: Exception) -> Response:
    """Answers an error in OpenAI's form."""
    if not isinstance(error, StarletteError):
        error = refusal(400, str(error))
    elif not isinstance(error.detail, dict):
        error = refusal(error.status_code, error.detail)
    return as_json({"error": error.detail}, error.status_code)


class Server:
    """A model that is served, and its answers to requests.

    Args:
        token: what clients must send as `Authorization: Bearer`; None: nothing.
        seconds: time after which a request is ended.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        tokenizer: Tokenizer,
        template: Template | None = None,
        *,
        token: str | None = None,
        seconds: float = 600.0,
    ) -> None:
        self.engine, self.tokenizer, self.template = engine, tokenizer, template
        self.token, self.seconds = token, seconds
        self.end_of_turn = template.end_of_turn() if template else ""
        self.model = {
            "id": name, "object": "model", "created": int(time.time()), "owned_by": "fastgpt",
            "context": engine.model.config.context, "chat": template is not None,
        }  # fmt: skip

    def app(self) -> FastAPI:
        """Returns the interface."""
        handlers: Any = {StarletteError: as_error, UserError: as_error}
        app = FastAPI(openapi_url=None, exception_handlers=handlers)
        api = APIRouter(prefix="/v1", dependencies=[Depends(self._admit)])

        @api.post("/completions")
        async def completions(request: Request) -> Response:
            return await self._answer(request, Completion)

        @api.post("/chat/completions")
        async def chat_completions(request: Request) -> Response:
            return await self._answer(request, Chat)

        @api.get("/models")
        async def models() -> Response:
            return as_json({"object": "list", "data": [self.model]})

        @api.get("/models/{name:path}")
        async def model(name: str) -> Response:
            self._check_name(name)
            return as_json(self.model)

        @app.get("/health")
        async def health() -> Response:
            counts = {"running": len(self.engine.running), "waiting": len(self.engine.waiting)}
            return as_json({"status": "ok", **counts})

        @app.get("/")
        async def page() -> Response:
            return FileResponse(Path(__file__).with_name("page.html"))

        app.include_router(api)
        return app

    def _admit(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if self.token and not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise refusal(401, "expected the header Authorization: Bearer TOKEN")
        if not self.token and not LOCAL.fullmatch(request.headers.get("host", "")):
            raise refusal(403, "expected localhost in the header Host")

    def _check_name(self, name: str) -> None:
        if name != self.model["id"]:
            raise refusal(404, f"there is no model {name!r}", "model", "model_not_found")

    async def _answer(self, request: Request, kind: type[Completion] | type[Chat]) -> Response:
        asked = await _read(request, kind)
        self._check_name(asked.model)
        events, loop = asyncio.Queue(), asyncio.get_running_loop()

        def put(*event: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(events.put_nowait, event)

        jobs = await run_in_threadpool(self._jobs, asked, put)
        try:
            self.engine.submit(jobs)
        except BusyError as error:
            raise refusal(429, str(error), code="busy") from error
        watch = asyncio.create_task(_watch(request, jobs))
        answer = Answer(self, asked, jobs)
        if asked.stream:
            lines = answer.stream(_pieces(events, jobs, watch))
            return StreamingResponse(lines, media_type="text/event-stream")
        return as_json(await answer.whole(_pieces(events, jobs, watch)))

    def _jobs(self, asked: Completion | Chat, put: Callable[..., None]) -> list[Job]:
        """Encodes the prompts of a request; `n` texts of the first come first."""
        prompts, config, jobs = asked.prompts(self), self.engine.model.config, []
        if not 1 <= len(prompts) * asked.n <= MOST:
            raise refusal(400, f"expected 1 to {MOST} texts in all", "n")
        most, top, strip = asked.max_tokens, asked.logprobs, isinstance(asked, Chat)
        if isinstance(asked, Chat):
            most = asked.max_completion_tokens or most or config.context
            top = asked.top_logprobs if asked.logprobs else None
        for ids in (ids for ids in prompts for _ in range(asked.n)):
            check_tokens(ids[None], config)
            room = config.context + 1 - len(ids)
            if room < 1:
                said = f"the prompt has {len(ids):,} tokens: expected at most {config.context:,}"
                raise refusal(400, said, "prompt", "context_length_exceeded")
            options = asked.options(len(jobs))
            options["stop"] = [*options["stop"], *[self.end_of_turn] * strip]
            text = Continuation(
                self.tokenizer, ids, max_new_tokens=min(most, room), logprobs=top, strip=strip,
                **options,
            )  # fmt: skip
            ends = time.monotonic() + self.seconds
            jobs.append(Job(ids, text, partial(put, len(jobs)), ends))
        return jobs


class Answer:
    """Form of an answer."""

    def __init__(self, server: Server, asked: Completion | Chat, jobs: list[Job]) -> None:
        self.asked, self.jobs, self.tokenizer = asked, jobs, server.tokenizer
        self.chat = isinstance(asked, Chat)
        kind = "chat.completion" + ".chunk" * asked.stream if self.chat else "text_completion"
        self.about = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}", "object": kind,
            "created": int(time.time()), "model": asked.model,
        }  # fmt: skip

    async def whole(self, pieces: AsyncIterator[tuple[int, Piece]]) -> dict[str, Any]:
        """Returns the answer when it is complete."""
        texts = [Piece("", [])] * len(self.jobs)
        async for index, piece in pieces:
            texts[index] += piece
        choices = [self._choice(index, text) for index, text in enumerate(texts)]
        return self.about | {"choices": choices, "usage": self._usage()}

    async def stream(self, pieces: AsyncIterator[tuple[int, Piece]]) -> AsyncIterator[str]:
        """Yields the answer as server-sent events."""
        usage = self.asked.stream_options.include_usage
        about = self.about | ({"usage": None} if usage else {})

        def event(content: dict[str, Any]) -> str:
            return f"data: {json.dumps(content)}\n\n"

        try:
            for index in range(len(self.jobs) * self.chat):
                yield event(about | {"choices": [self._choice(index, Piece("", []), "assistant")]})
            async for index, piece in pieces:
                if piece.text or piece.finish:
                    yield event(about | {"choices": [self._choice(index, piece)]})
            if usage:
                yield event(about | {"choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        except HTTPException as error:
            yield event({"error": error.detail})

    def _usage(self) -> dict[str, int]:
        asked = sum(len(job.prompt) for job in self.jobs[:: self.asked.n])
        drawn = sum(job.length + 1 - len(job.prompt) for job in self.jobs)
        return {
            "prompt_tokens": asked, "completion_tokens": drawn, "total_tokens": asked + drawn,
        }  # fmt: skip

    def _choice(self, index: int, piece: Piece, role: str | None = None) -> dict[str, Any]:
        said: dict[str, Any] = {"text": piece.text}
        if self.chat:
            message = {"content": piece.text} | ({"role": role} if role else {})
            said = (
                {"delta": message}
                if self.asked.stream
                else {"message": {"role": "assistant"} | message}
            )
        logprobs = None if self.jobs[index].text.logprobs is None else self._logprobs(piece.tokens)
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": piece.finish}

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any]:
        def entry(id: int, logprob: float | None) -> dict[str, Any]:
            text = self.tokenizer.decode([id])
            # the bytes of a part of a character are not known
            data = None if REPLACEMENT in text else [*text.encode(errors="replace")]
            return {"token": text, "logprob": logprob, "bytes": data}

        each = [(entry(x.id, x.logprob), [entry(*top) for top in x.top]) for x in tokens]
        if self.chat:
            return {"content": [one | {"top_logprobs": top} for one, top in each]}
        return {
            "tokens": [one["token"] for one, _ in each],
            "token_logprobs": [one["logprob"] for one, _ in each],
            "top_logprobs": [{x["token"]: x["logprob"] for x in top} for _, top in each],
            "text_offset": [x.offset for x in tokens],
        }


async def _read(request: Request, kind: type[Completion] | type[Chat]) -> Completion | Chat:
    """Reads a request; raises `refusal` if it is no such one."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise refusal(415, "expected the content type application/json")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LONGEST_BODY:
            raise refusal(413, f"expected at most {LONGEST_BODY:,} bytes")
    try:
        return kind.model_validate_json(bytes(body))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else None
        raise refusal(400, f"{name or 'the request'}: {first['msg']}", name) from error


async def _watch(request: Request, jobs: list[Job]) -> None:
    """Gives up the texts as soon as the client hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    for job in jobs:
        job.abandoned = True


async def _pieces(
    events: asyncio.Queue, jobs: list[Job], watch: asyncio.Task
) -> AsyncIterator[tuple[int, Piece]]:
    """Yields the pieces of all texts as they come, with their numbers."""
    left = len(jobs)
    try:
        while left:
            index, event = await events.get()
            if isinstance(event, Exception):
                late = isinstance(event, TimeoutError | ConnectionAbortedError)
                raise refusal(503 if late else 500, str(event) or type(event).__name__)
            left -= event.finish is not None
            yield index, event
    finally:
        watch.cancel()
        for job in jobs:
            job.abandoned = True
