"""Chats to tokens by a tokenizer's chat template, and which of them a model was trained on.

Equal to ``apply_chat_template(..., return_assistant_tokens_mask=True)`` of transformers where the template
marks what the assistant generates (``{% generation %}``). Where it does not, the turn of an assistant is what
the template adds to the messages before it and their generation prompt; text and tokens of these prefixes
must be those of the whole chat.

A template is code from outside: it runs in Jinja's immutable sandbox, and sees plain JSON values only.
"""

import json
import re
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import numpy as np
import numpy.typing as npt

from ppl_eval.tokenization.tokenizer import TextEncoder

Messages = list[dict[str, Any]]
Span = tuple[int, int]

LOSSES = ("assistant", "last", "all")
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Names that a message's reasoning goes by; templates read the first, some the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class Chat:
    """A chat as a template gets it.

    Attributes:
        messages: each with a ``role``, mostly with ``content``.
        tools: JSON schemas of tools that the model may call, or None.
        where: where it was read, for messages.
    """

    messages: Messages
    tools: list[Any] | None
    where: str


@dataclass
class ChatTemplate:
    """A chat template with what it is given besides a chat.

    Attributes:
        source: the template.
        variables: the tokenizer's special tokens, and the arguments that the person gave.
        uses_date: whether a chat asked for today's date.
        has_no_prompt: whether a chat had no generation prompt where an assistant's turn begins.
    """

    source: str
    variables: dict[str, Any]
    uses_date: bool = field(default=False, init=False)
    has_no_prompt: bool = field(default=False, init=False)

    @property
    def marks_generation(self) -> bool:
        """Whether the template says what the assistant generates."""
        return _MARKS.search(self.source) is not None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationMarks, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": self._strftime_now}
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is no valid Jinja template: {error}") from error

    def render(self, chat: Chat, count: int | None = None, *, prompt: bool = False) -> tuple[str, list[Span]]:
        """Return the text of a chat, and the spans of characters that the template marks as generated.

        Args:
            chat: the chat.
            count: take so many messages from its head; None for all.
            prompt: end with the generation prompt.

        Raises:
            ValueError: if the template refuses the chat.
        """
        template = self._compiled
        marks: _GenerationMarks = template.environment.extensions[_GenerationMarks.identifier]  # type: ignore[assignment]
        marks.blocks, marks.spans = [], []
        messages = [_with_reasoning(message) for message in chat.messages[:count]]
        given = _plain({"messages": messages, "tools": chat.tools, "documents": None, **self.variables})
        try:
            for block in template.generate(add_generation_prompt=prompt, **given):
                marks.blocks.append(block)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            ArithmeticError,
        ) as error:
            raise ValueError(f"{chat.where}: the chat template refuses it: {error}") from error
        return "".join(marks.blocks), marks.spans

    def _strftime_now(self, form: str) -> str:
        self.uses_date = True
        return datetime.now().strftime(form)


def load_template(
    encoder: TextEncoder, path: str | None, arguments: dict[str, Any], tools: bool
) -> ChatTemplate:
    """Return a tokenizer's chat template: ``chat_template.jinja`` in its folder, else what its
    tokenizer_config.json holds, as transformers chooses.

    Args:
        encoder: the run's tokenizer.
        path: a file to use instead; None for the tokenizer's own.
        arguments: what else the template gets.
        tools: whether chats have tools, for tokenizers with a template of its own for these.

    Raises:
        ValueError: if there is no template, or several and none to choose.
    """
    config = getattr(encoder.tokenizer, "config", None) or {}
    file = Path(path).expanduser() if path is not None else (encoder.folder or Path()) / "chat_template.jinja"
    if path is not None or (encoder.folder is not None and file.is_file()):
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"dataset.chat_template: cannot read {file}: {error}") from error
    else:
        source = _configured(config.get("chat_template"), tools)
    special = {}
    for name, token in config.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            special[name] = text
    return ChatTemplate(source, special | arguments)


def _configured(found: Any, tools: bool) -> str:
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found}
        found = named.get("tool_use", named.get("default")) if tools else named.get("default")
        if found is None:
            raise ValueError(
                f"the tokenizer has the chat templates {', '.join(named)} and no default; put the one to use "
                "into a file and name it as dataset.chat_template"
            )
    if not isinstance(found, str):
        raise ValueError(
            "the tokenizer has no chat template: no chat_template.jinja beside its tokenizer.json, and no "
            "chat_template in its tokenizer_config.json (tokenizer.tokenizer_config_json_path); name a file "
            "as dataset.chat_template"
        )
    return found


@dataclass(frozen=True)
class EncodedChat:
    """A chat as tokens.

    Attributes:
        text: what the template made of it.
        ids: its tokens, int64.
        trained: tokens that the loss counts, bool.
    """

    text: str
    ids: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_]


def encode_chat(template: ChatTemplate, tokenizer: Any, chat: Chat, loss: str) -> EncodedChat:
    """Encode a chat.

    Args:
        template: the tokenizer's.
        tokenizer: a ``tokenizers.Tokenizer``.
        chat: the chat.
        loss: what is trained on, one of ``LOSSES``.

    Raises:
        ValueError: if the template refuses the chat, or it has no marks and prefixes of the chat disagree.
    """
    text, spans = template.render(chat)
    encoded = _encode(tokenizer, text)
    ids = np.array(encoded.ids, dtype=np.int64)
    trained = np.full(len(ids), loss == "all")
    if loss != "all" and template.marks_generation:
        begin, end = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2).T
        for start, stop in spans[-1:] if loss == "last" else spans:
            trained |= (end > start) & (begin < stop)
    elif loss != "all":
        turns = [i for i, message in enumerate(chat.messages) if message.get("role") == "assistant"]
        for turn in turns[-1:] if loss == "last" else turns:
            first, last = (
                _tokens_before(template, tokenizer, _Prefix(chat, count, prompt), text, ids)
                for count, prompt in ((turn, True), (turn + 1, False))
            )
            trained[first:last] = True
    return EncodedChat(text, ids, trained)


@dataclass(frozen=True)
class _Prefix:
    chat: Chat
    count: int
    prompt: bool


def _tokens_before(
    template: ChatTemplate, tokenizer: Any, prefix: _Prefix, text: str, ids: npt.NDArray[np.int64]
) -> int:
    chat, count, prompt = prefix.chat, prefix.count, prefix.prompt
    before = text if count == len(chat.messages) else template.render(chat, count, prompt=prompt)[0]
    advice = (
        "so it cannot be known which tokens are the assistant's; mark them in the template with "
        "{% generation %} and {% endgeneration %} and name that file as dataset.chat_template, or use "
        "dataset.loss=last or all"
    )
    asked = f"the first {count} of {len(chat.messages)} messages" + (
        " with a generation prompt" if prompt else ""
    )
    if not text.startswith(before):
        at = next(i for i, (a, b) in enumerate(zip(before + "\0", text + "\1", strict=False)) if a != b)
        raise ValueError(
            f"{chat.where}: the chat template makes of {asked} {before[max(0, at - 20) : at + 20]!r} where "
            f"the whole chat has {text[max(0, at - 20) : at + 20]!r}, {advice}"
        )
    if prompt and not template.has_no_prompt:
        template.has_no_prompt = before == template.render(chat, count)[0]
    expected = np.array(_encode(tokenizer, before).ids, dtype=np.int64)
    if not np.array_equal(ids[: len(expected)], expected):
        raise ValueError(
            f"{chat.where}: a token of the chat goes across the end of {asked}, "
            f"{before[-20:]!r}|{text[len(before) : len(before) + 20]!r}, {advice}"
        )
    return len(expected)


def _encode(tokenizer: Any, text: str) -> Any:
    # A template's special tokens are meant, whatever the protocol says about texts.
    tokenizer.encode_special_tokens = False
    return tokenizer.encode(text, add_special_tokens=False)


class _GenerationMarks(jinja2.ext.Extension):
    """The tag ``{% generation %}``: notes where in the text its content stands."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.blocks: list[str] = []
        self.spans: list[Span] = []

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: jinja2.runtime.Macro) -> str:
        generated = caller()
        start = sum(map(len, self.blocks))
        self.spans.append((start, start + len(generated)))
        return generated


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    # As transformers: no keys without a value, which templates would write as "None".
    message = {key: value for key, value in message.items() if value is not None}
    found = next((message[name] for name in _REASONING if name in message), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes what HTML does not like.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
