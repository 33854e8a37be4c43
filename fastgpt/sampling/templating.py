"""Chat templates in Jinja, which turn messages into text as transformers applies them."""

from collections.abc import Iterator
from contextlib import contextmanager

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fastgpt.errors import UserError, reason

Messages = list[dict[str, str]]
Part = tuple[str | None, bool]
"""Part of a rendered conversation, None for the end of text before it, and whether it is learnt."""
EXTERNAL = "{% set bos_token = "
"""Beginning of a template that writes all of a conversation, even what begins it."""
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Generation(Extension):
    """The tag `generation` around answers, which transformers knows; here it does nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's way

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@contextmanager
def _said_in_one_line(refusal: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a template may do anything
        raise UserError(f"the chat template {refusal}: {reason(error)}") from error


def _refuse(message: str) -> None:
    raise TemplateError(message)


class Template:
    """Chat template in Jinja, which runs in Jinja's sandbox.

    Raises:
        UserError: the template cannot be parsed.
    """

    def __init__(self, text: str = CHATML) -> None:
        extensions = ["jinja2.ext.loopcontrols", Generation]
        jinja = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions
        )
        jinja.globals["raise_exception"] = _refuse
        self.text = text
        with _said_in_one_line("cannot be read"):
            self._compiled = jinja.from_string(text)

    def render(self, messages: Messages, *, answering: bool = False) -> str:
        """Returns the text of messages, with `answering` up to where the next answer begins.

        It has the variables that transformers gives, and empty tokens unless it sets them.
        """
        none = {"tools": None, "documents": None, "bos_token": "", "eos_token": ""}
        with _said_in_one_line("refuses the messages"):
            return self._compiled.render(messages=messages, add_generation_prompt=answering, **none)

    def pieces(self, messages: Messages) -> Iterator[Part]:
        """Yields the text of a conversation, cut where answers begin and end.

        The last piece asks for an answer, if the last message is not one; it is the only one of a
        template from elsewhere, so that the ids match transformers'.

        Raises:
            UserError: the template writes a conversation anew when it goes on.
        """
        external = self.text.startswith(EXTERNAL)
        if external and messages[-1]["role"] != "assistant":
            yield self.render(messages, answering=True), False
            return
        if not external:
            yield None, False
        done = ""
        for end, message in enumerate(messages):
            answers = message["role"] == "assistant"
            if not answers and end + 1 < len(messages):
                continue
            asked = self.render(messages[: end + (not answers)], answering=True)
            full = self.render(messages[: end + 1]) if answers else asked
            if not (asked.startswith(done) and full.startswith(asked)):
                raise UserError(
                    "the chat template changes earlier turns when a conversation goes on: expected"
                    " one that only adds text"
                )
            yield asked[len(done) :], False
            if answers:
                yield full[len(asked) :], True
            done = full

    def end_of_turn(self) -> str:
        """Returns what follows an answer, without white space around it; may be empty."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "\ue000"}]
        return self.render(turns).rpartition("\ue000")[2].strip()
