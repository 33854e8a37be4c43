"""The HTTP interface, which is OpenAI's: models, completions and chat completions."""

import asyncio
import hmac
import json
import re
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, Response, StreamingResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
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

Id = Annotated[int, Field(ge=0, lt=2**31)]
LONGEST_BODY = 2**22
"""Bytes of the longest request."""
MOST = 64
"""Most texts of a request: prompts times `n`."""
LOCAL = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.I)
"""Hosts that answer without a token: another name in a browser may lead to this machine, too."""
ERRORS = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
DRAWING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
PAGE = Path(__file__).with_name("page.html")


class Fields(BaseModel):
    """Object of a request; null stands for a field's default, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        pairs = given.items() if isinstance(given, dict) else ()
        return {name: x for name, x in pairs if x is not None} if pairs else given


def _several(given: Any) -> Any:
    """Returns a text, or its ids, as a list of one."""
    one = isinstance(given, str) or (isinstance(given, list) and isinstance((*given, "")[0], int))
    return [given] if one else given


class StreamOptions(Fields):
    include_usage: bool = False


class Asked(Fields):
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
    user: str = ""
    # accepted where they change nothing
    frequency_penalty: float = Field(0, ge=0, le=0)
    presence_penalty: float = Field(0, ge=0, le=0)
    logit_bias: dict[str, float] = Field({}, max_length=0)


class Completion(Asked):
    kind: ClassVar = "text_completion"
    prompt: Annotated[
        list[str | list[Id]], BeforeValidator(_several), Field(min_length=1, max_length=MOST)
    ] = [""]  # fmt: skip
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)

    def prompts(self, server: "Server") -> list[Tensor]:
        ids = (encode_prompt(x, server.tokenizer) if isinstance(x, str) else x for x in self.prompt)
        return [torch.as_tensor(x) for x in ids]

    def options(self, server: "Server") -> dict[str, Any]:
        return {"max_new_tokens": self.max_tokens, "logprobs": self.logprobs, "stop": self.stop}


class TextPart(Fields):
    type: Literal["text"]
    text: str


class Message(Fields):
    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]
    name: str = ""


class Chat(Asked):
    kind: ClassVar = "chat.completion"
    messages: list[Message] = Field(min_length=1, max_length=256)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    def prompts(self, server: "Server") -> list[Tensor]:
        if server.template is None:
            raise refusal(400, "the model has no chat template: expected /v1/completions", "model")
        messages = []
        for x in self.messages:
            parts = [x.content] if isinstance(x.content, str) else [part.text for part in x.content]
            messages.append({"role": x.role, "content": "".join(parts)})
        if messages[-1]["role"] == "assistant":
            raise refusal(400, "the last message is an answer: expected a question", "messages")
        refuse_special(server.tokenizer, messages)
        return [torch.from_numpy(encode(server.tokenizer, server.template.pieces(messages))[0])]

    def options(self, server: "Server") -> dict[str, Any]:
        top = self.top_logprobs if self.logprobs else None
        stop, most = [*self.stop, server.end_of_turn], self.max_completion_tokens or self.max_tokens
        return {"max_new_tokens": most, "logprobs": top, "stop": stop, "strip": True}


def refusal(status: int, message: str, param: str = "", code: str = "") -> HTTPException:
    """Returns the exception that is answered with OpenAI's form of an error."""
    detail: Any = {"message": message, "type": ERRORS.get(status, "invalid_request_error")}
    return HTTPException(status, detail | {"param": param or None, "code": code or None})


def as_json(content: Any, status: int = 200) -> Response:
    # in ASCII, because a tokenizer may know halves of surrogate pairs, which UTF-8 does not
    return Response(json.dumps(content), status, media_type="application/json")


async def as_error(_: Request, error: Exception) -> Response:
    """Answers an error in OpenAI's form."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        name = str((*first["loc"], "")[1])
        error = refusal(400, f"{name or 'the request'}: {first['msg']}", name)
    elif not isinstance(error, StarletteError):
        error = refusal(400 if isinstance(error, UserError) else 500, str(error))
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
        self, name: str, engine: Engine, tokenizer: Tokenizer, template: Template | None = None, *,
        token: str | None = None, seconds: float = 600.0,
    ) -> None:  # fmt: skip
        self.engine, self.tokenizer, self.template = engine, tokenizer, template
        self.token, self.seconds = token, seconds
        self.end_of_turn = template.end_of_turn() if template else ""
        self.model = {
            "id": name, "object": "model", "created": int(time.time()), "owned_by": "fastgpt",
            "context": engine.model.config.context, "chat": template is not None,
        }  # fmt: skip

    def app(self) -> FastAPI:
        """Returns the interface."""
        kinds = (StarletteError, RequestValidationError, UserError, Exception)
        handlers: dict[Any, Any] = dict.fromkeys(kinds, as_error)
        app = FastAPI(openapi_url=None, max_body_size=LONGEST_BODY, exception_handlers=handlers)
        api = APIRouter(prefix="/v1", dependencies=[Depends(self._admit)])

        @api.post("/completions")
        async def completions(asked: Completion, request: Request) -> Response:
            return await self._answer(asked, request)

        @api.post("/chat/completions")
        async def chat_completions(asked: Chat, request: Request) -> Response:
            return await self._answer(asked, request)

        @api.get("/models")
        async def models() -> Response:
            return as_json({"object": "list", "data": [self.model]})

        @api.get("/models/{name:path}")
        async def model(name: str) -> Response:
            return as_json(self._check_name(name))

        @app.get("/health")
        async def health() -> Response:
            counts = {"running": len(self.engine.running), "waiting": len(self.engine.waiting)}
            return as_json({"status": "ok", **counts})

        app.add_api_route("/", lambda: FileResponse(PAGE), response_class=FileResponse)
        app.include_router(api)
        return app

    async def _admit(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if self.token and not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise refusal(401, "expected the header Authorization: Bearer TOKEN")
        if not self.token and not LOCAL.fullmatch(request.headers.get("host", "")):
            raise refusal(403, "expected localhost in the header Host")

    def _check_name(self, name: str) -> dict[str, Any]:
        if name != self.model["id"]:
            raise refusal(404, f"there is no model {name!r}", "model", "model_not_found")
        return self.model

    async def _answer(self, asked: Completion | Chat, request: Request) -> Response:
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
        pieces = _pieces(events, jobs, asyncio.create_task(_watch(request, jobs)))
        about = {
            "id": uuid.uuid4().hex, "created": int(time.time()), "model": asked.model,
            "object": asked.kind + ".chunk" * (asked.stream and isinstance(asked, Chat)),
        }  # fmt: skip
        if asked.stream:
            lines = self._events(asked, about, jobs, pieces)
            return StreamingResponse(lines, media_type="text/event-stream")
        whole = [Piece("", [])] * len(jobs)
        async for index, piece in pieces:
            whole[index] += piece
        choices = [self._choice(asked, *each) for each in enumerate(whole)]
        return as_json(about | {"choices": choices, "usage": usage(asked, jobs)})

    def _jobs(self, asked: Completion | Chat, put: Callable[..., None]) -> list[Job]:
        """Encodes the prompts of a request; `n` texts of the first come first."""
        prompts, config, jobs = asked.prompts(self), self.engine.model.config, []
        if len(prompts) * asked.n > MOST:
            raise refusal(400, f"expected at most {MOST} texts in all", "n")
        options = {name: getattr(asked, name) for name in DRAWING} | asked.options(self)
        most = options.pop("max_new_tokens") or config.context
        for ids in (ids for ids in prompts for _ in range(asked.n)):
            check_tokens(ids[None], config)
            room = config.context + 1 - len(ids)
            if room < 1:
                said = f"the prompt has {len(ids):,} tokens: expected at most {config.context:,}"
                raise refusal(400, said, "prompt", "context_length_exceeded")
            options["generator"] = torch.Generator().manual_seed(asked.seed + len(jobs))
            options["max_new_tokens"] = min(most, room)
            text = Continuation(self.tokenizer, ids, **options)
            jobs.append(Job(ids, text, partial(put, len(jobs)), time.monotonic() + self.seconds))
        return jobs

    async def _events(
        self, asked: Completion | Chat, about: dict[str, Any], jobs: list[Job],
        pieces: AsyncIterator[tuple[int, Piece]],
    ) -> AsyncIterator[str]:  # fmt: skip
        """Yields an answer as server-sent events."""
        ends = asked.stream_options.include_usage

        def event(choices: list[dict[str, Any]], counts: dict[str, int] | None = None) -> str:
            counted = {"usage": counts} if ends else {}
            return f"data: {json.dumps(about | {'choices': choices} | counted)}\n\n"

        try:
            for index in range(len(jobs) * isinstance(asked, Chat)):
                yield event([self._choice(asked, index, Piece("", []), True)])
            async for index, piece in pieces:
                if piece.text or piece.finish:
                    yield event([self._choice(asked, index, piece)])
            if ends:
                yield event([], usage(asked, jobs))
            yield "data: [DONE]\n\n"
        except HTTPException as error:
            yield f"data: {json.dumps({'error': error.detail})}\n\n"

    def _choice(
        self, asked: Completion | Chat, index: int, piece: Piece, first: bool = False
    ) -> dict[str, Any]:
        said: dict[str, Any] = {"text": piece.text}
        if isinstance(asked, Chat):
            role = {"role": "assistant"} if first or not asked.stream else {}
            said = {"delta" if asked.stream else "message": role | {"content": piece.text}}
        known = asked.logprobs is not None and asked.logprobs is not False
        logprobs = self._logprobs(piece.tokens, isinstance(asked, Chat)) if known else None
        return {"index": index, "finish_reason": piece.finish, "logprobs": logprobs, **said}

    def _logprobs(self, tokens: list[Token], chat: bool) -> dict[str, Any]:
        def entry(id: int, logprob: float | None) -> dict[str, Any]:
            text = self.tokenizer.decode([id])
            # the bytes of a part of a character are not known
            data = None if REPLACEMENT in text else [*text.encode(errors="replace")]
            return {"token": text, "logprob": logprob, "bytes": data}

        each = [(entry(x.id, x.logprob), [entry(*top) for top in x.top]) for x in tokens]
        if chat:
            return {"content": [one | {"top_logprobs": top} for one, top in each]}
        return {
            "tokens": [one["token"] for one, _ in each],
            "token_logprobs": [one["logprob"] for one, _ in each],
            "top_logprobs": [{x["token"]: x["logprob"] for x in top} for _, top in each],
            "text_offset": [x.offset for x in tokens],
        }


def usage(asked: Asked, jobs: list[Job]) -> dict[str, int]:
    prompts = sum(len(job.prompt) for job in jobs[:: asked.n])
    drawn = sum(job.length + 1 - len(job.prompt) for job in jobs)
    total = prompts + drawn
    return {"prompt_tokens": prompts, "completion_tokens": drawn, "total_tokens": total}


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
            index, found = await events.get()
            if isinstance(found, Exception):
                late = isinstance(found, TimeoutError | ConnectionAbortedError)
                raise refusal(503 if late else 500, str(found) or type(found).__name__)
            left -= found.finish is not None
            yield index, found
    finally:
        watch.cancel()
        for job in jobs:
            job.abandoned = True
