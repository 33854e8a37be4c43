"""Chat templates in Jinja, which turn messages into text as transformers applies them."""

from functools import lru_cache

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Messages = list[dict[str, str]]
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


def render(text: str, messages: Messages | None, answering: bool) -> str:
    """Returns the text of messages, in a sandbox, with the variables that transformers gives.

    Args:
        text: the template; `bos_token` and `eos_token` are empty where it does not set them.
        messages: None: the template is only read.
        answering: ends the text where the next answer begins.
    """
    template = _compiled(text)
    if messages is None:
        return ""
    given = {"messages": messages, "add_generation_prompt": answering}
    none = {"tools": None, "documents": None}
    return template.render(**given, **none, bos_token="", eos_token="")


@lru_cache(maxsize=1)
def _compiled(text: str) -> Template:
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    jinja.globals["raise_exception"] = _refuse
    return jinja.from_string(text)


def _refuse(message: str) -> None:
    raise TemplateError(message)
