"""Conversations: supervised fine-tuning on their answers, and talking with a model.

A chat template turns messages into text, as transformers applies it. Each answer is encoded by
itself, with the end of its turn, so that training and talking see the same tokens.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fastgpt.data.items import IGNORED, Data
from fastgpt.data.tokenizers import Tokenizer
from fastgpt.errors import UserError, reason
from fastgpt.files import parse_json
from fastgpt.model.gpt import GPT
from fastgpt.sampling.streaming import print_stream, stream
from fastgpt.sampling.templating import EXTERNAL, Messages, Part, Template
from fastgpt.terminal import print_line

Encoded = tuple[np.ndarray, np.ndarray]
"""Ids of a conversation (N,) int64, and which of them are learnt (N,) bool."""


def template_of(files: Mapping[str, str]) -> Template | None:
    """Returns the chat template among the files of a model, if there is one.

    A template from Hugging Face then sets `bos_token` and `eos_token`, to be kept alone.

    Raises:
        UserError: as `Template`, or the file that should have it is damaged.
    """
    text, settings = _text_and_settings(files)
    if text is None or "tokenizer_config.json" not in files:
        return None if text is None else Template(text)
    sets = ""
    for name in ("bos_token", "eos_token"):
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        said = json.dumps(token if isinstance(token, str) else "", ensure_ascii=False)
        sets += f"{{% set {name} = {said} %}}\n"
    return Template(sets + text)


def text_elsewhere(files: Mapping[str, str], tokenizer: Tokenizer | None) -> str | None:
    """Returns the chat template for other programs, which write no end of text before it."""
    text, _ = _text_and_settings(files)
    if text is None or text.startswith(EXTERNAL) or "tokenizer_config.json" in files:
        return text
    begin = None if tokenizer is None else tokenizer.eot_id
    return text if tokenizer is None or begin is None else tokenizer.decode([begin]) + text


def _text_and_settings(files: Mapping[str, str]) -> tuple[str | None, dict[str, Any]]:
    """Returns the chat template as it stands, and the content of tokenizer_config.json."""
    try:
        settings = parse_json(files.get("tokenizer_config.json", "{}"))
    except ValueError as error:
        raise UserError(f"tokenizer_config.json cannot be read: {error}") from error
    settings = settings if isinstance(settings, dict) else {}
    text = files.get("chat_template.jinja", settings.get("chat_template"))
    return text if isinstance(text, str) else None, settings


def encode(tokenizer: Tokenizer, pieces: Iterator[Part]) -> Encoded:
    """Returns the ids of a conversation, and which of them are learnt.

    It begins with the end-of-text token, as every document does, unless the template comes from
    elsewhere. Special tokens of the tokenizer that the template writes have their ids; in a
    tokenizer without them they are ordinary text.
    """
    end = [] if tokenizer.eot_id is None else [tokenizer.eot_id]
    ids, learnt = [], []
    for text, counts in pieces:
        found = end if text is None else tokenizer.encode_marked(text)
        ids.append(np.asarray(found, np.int64))
        learnt.append(np.full(len(found), counts))
    return np.concatenate(ids), np.concatenate(learnt)


# --- data -----------------------------------------------------------------------------------------


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Conversations as pairs (tokens, targets), each (context,) int64; -100 outside of answers.

    Args:
        conversations: each of up to context + 1 tokens.
        pad_id: what short rows are filled with.
        packed: puts as many conversations into a row as fit, else one.
    """

    def __init__(
        self, conversations: list[Encoded], context: int, pad_id: int, packed: bool
    ) -> None:
        self._context, self._pad_id = context, pad_id
        self._rows: list[list[Encoded]] = []
        room = 0
        for ids, learnt in conversations:
            if not packed or len(ids) > room:
                self._rows.append([])
                room = context + 1
            self._rows[-1].append((ids, learnt))
            room -= len(ids)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        ids, learnt = (np.concatenate(parts) for parts in zip(*self._rows[i]))
        x, y = torch.full((self._context,), self._pad_id), torch.full((self._context,), IGNORED)
        x[: len(ids)] = torch.from_numpy(ids)[: self._context]
        y[: len(ids) - 1] = torch.from_numpy(np.where(learnt, ids, IGNORED))[1:]
        return x, y


def open_conversations(
    path: Path,
    tokenizer: Tokenizer,
    template: Template,
    *,
    context: int,
    packed: bool,
    val_fraction: float,
) -> Data:
    """Reads the conversations of a JSONL file, and holds out the last ones.

    A line has `messages` of the roles system, user and assistant, or `prompt` and `completion`.

    Raises:
        UserError: a line is something else; the turns do not alternate; an answer is empty; a
            message contains a special token or an end of turn; a conversation is longer than the
            context; there are fewer than two.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from error
    encoded = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                messages = _messages(parse_json(line))
                refuse_special(tokenizer, template, messages)
                encoded.append(encode(tokenizer, template.pieces(messages)))
                if (size := len(encoded[-1][0])) > context + 1:
                    raise UserError(
                        f"the conversation has {size:,} tokens: expected at most {context + 1:,},"
                        f" for a --model.context of {context:,}"
                    )
        except (ValueError, UserError) as error:
            said = error if isinstance(error, UserError) else f"not JSON ({error})"
            raise UserError(f"{path}, line {number}: {said}") from error
    if len(encoded) < 2:
        raise UserError(f"{path} has {len(encoded)} conversations: expected two or more")
    held = min(len(encoded) - 1, max(1, round(len(encoded) * val_fraction)))
    train, val = (
        Rows(part, context, tokenizer.eot_id or 0, packed)
        for part in (encoded[:-held], encoded[-held:])
    )
    return Data(train=train, val=val, tokenizer=tokenizer, name=path.stem, template=template.text)


def _messages(row: Any) -> Messages:
    """Returns the messages of a line, which the system may begin, then users and answers in turn.

    Raises:
        UserError: the line is not a conversation, or does not end in an answer.
    """
    row = row if isinstance(row, dict) else {}
    messages = row.get("messages")
    if messages is None and {"prompt", "completion"} <= row.keys():
        turns = (("user", row["prompt"]), ("assistant", row["completion"]))
        messages = [{"role": role, "content": text} for role, text in turns]
    if not isinstance(messages, list):
        raise UserError("expected an object with `messages`, or with `prompt` and `completion`")
    expected = ["system", "user"]
    for number, message in enumerate(messages, start=1):
        fine = isinstance(message, dict) and isinstance(message.get("content"), str)
        role = message.get("role") if fine else None
        if role not in expected or (role == "assistant" and not message["content"].strip()):
            raise UserError(
                f"message {number} is {str(message)[:80]}: expected a role ({', '.join(expected)})"
                " and a content, which of an answer is not empty"
            )
        expected = ["assistant"] if role == "user" else ["user"]
    if not messages or messages[-1]["role"] != "assistant":
        raise UserError("the last message is not the assistant's: expected an answer to learn")
    return messages


def refuse_special(tokenizer: Tokenizer, template: Template, messages: Messages) -> None:
    """Raises `UserError` if a message has a special token, or the text that ends a turn."""
    for name in filter(None, (*getattr(tokenizer, "special", {}), template.end_of_turn())):
        if any(name in message["content"] for message in messages):
            raise UserError(f"a message contains {name}, with which it could end its turn")


# --- talking --------------------------------------------------------------------------------------


def talk(model: GPT, tokenizer: Tokenizer, template: Template, **options: Any) -> None:
    """Answers each line of standard input, as one conversation, until it ends.

    When it is longer than the context, its oldest turns are left out. Ctrl-C ends an answer.
    """
    messages: Messages = []
    options["stop"] = [template.end_of_turn(), *options.get("stop", ())]
    context = model.config.context
    for line in filter(str.strip, sys.stdin):
        messages.append({"role": "user", "content": line.strip()})
        while len(ids := encode(tokenizer, template.pieces(messages))[0]) >= context:
            if len(messages) == 1:
                print_line(f"{len(ids):,} tokens are more than the context of {context:,}")
                messages = []
                break
            messages = messages[2:]
        if messages:
            pieces = stream(model, tokenizer, torch.from_numpy(ids), strip=True, **options)
            said = print_stream(map(str, pieces), interruptible=True)
            messages.append({"role": "assistant", "content": said})
