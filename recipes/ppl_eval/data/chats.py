"""Chats in the forms that people have them, for models with a tokenizer.json and a chat template."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

from ppl_eval.data.chat_template import LOSSES, Chat, EncodedChat, Messages, encode_chat, load_template
from ppl_eval.data.input_files import expand_paths
from ppl_eval.data.samples import Ids, Sample, SampleCounts, SampleSource
from ppl_eval.data.sources import ALL, EncodeRequest
from ppl_eval.data.tables import TABLES, load_named, named_rows, table_of, table_rows
from ppl_eval.tokenization.text_spans import Measure
from ppl_eval.tokenization.word_count import START

Row = dict[str, Any]

# Who speaks, in the `from` of ShareGPT's form.
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


def chat(
    paths: str | Sequence[str] | None = None,
    *,
    name: str | None = None,
    split: str | None = None,
    config_name: str | None = None,
    revision: str | None = None,
    form: str | None = None,
    loss: str = "assistant",
    chat_template: str | None = None,
    template_arguments: Mapping[str, Any] | None = None,
) -> SampleSource:
    """Chats, made to tokens by the chat template of the run's tokenizer.

    Args:
        paths: ``.jsonl``, ``.json``, ``.csv``, ``.parquet`` or ``.arrow`` files or globs, a chat a row.
        name: a Hugging Face dataset instead.
        split: its split.
        config_name: its configuration.
        revision: branch, tag or commit of it.
        form: one of ``FORMS``; null takes the only one that a row's columns fit.
        loss: what is scored: the turns of the ``assistant``, only the ``last`` of them, or ``all``.
        chat_template: a file with a Jinja template, instead of the tokenizer's own.
        template_arguments: what else the template gets, such as ``enable_thinking`` or ``date_string``.

    Raises:
        ValueError: if an argument is none of the allowed ones, or a path names no file.
    """
    for key, value, allowed in (("loss", loss, LOSSES), ("form", form, (*FORMS, None))):
        if value not in allowed:
            raise ValueError(f"dataset.{key} is {value!r}; allowed: {', '.join(map(str, allowed))}")
    if (paths is None) == (name is None):
        raise ValueError("dataset: give either paths (files) or name (a Hugging Face dataset)")
    arguments = dict(template_arguments or {})
    parameters: dict[str, Any] = {"form": form, "loss": loss, "chat_template": chat_template}
    parameters["template_arguments"] = arguments
    notes: list[str] = []
    if paths is not None:
        found = expand_paths(paths)
        notes = found.notes()
        for file in found.files:
            if table_of(file) is None:
                raise ValueError(f"dataset.paths: {file} is no table by its suffix ({', '.join(TABLES)})")
        parameters |= found.parameters()

        def read() -> Iterator[tuple[str, Any]]:
            for file in found.files:
                yield from table_rows(file)

    else:
        if split is None:
            raise ValueError(f"dataset.split is missing; name the split of {name} to score")
        named = {"config_name": config_name, "split": split, "revision": revision}
        parameters |= {"name": name, **named}

        def read() -> Iterator[tuple[str, Any]]:
            return named_rows(load_named(str(name), streaming=True, **named), str(name))

    options = _Options(form, loss, chat_template, arguments, notes)
    return SampleSource("chat", parameters, {ALL: partial(_samples, read, options)})


@dataclass(frozen=True)
class _Options:
    form: str | None
    loss: str
    chat_template: str | None
    template_arguments: dict[str, Any]
    notes: list[str]


def _samples(
    read: Callable[[], Iterator[tuple[str, Any]]],
    options: _Options,
    request: EncodeRequest,
    counts: SampleCounts,
) -> Iterator[Sample]:
    encoder = request.encoder
    tokenizer = getattr(encoder.tokenizer, "tokenizer", None)
    if not hasattr(tokenizer, "token_to_id"):
        raise ValueError(
            f"ppl_eval.data.chat needs a tokenizer.json, and {type(encoder.tokenizer).__name__} has none; "
            "use torchtune.modules.transforms.tokenizers.HuggingFaceBaseTokenizer, or ppl_eval.data.sft with "
            "a dataset of torchtune"
        )
    spans = encoder.encoding.spans() if encoder.encoding.spans else None
    measure = None if spans is None else Measure(spans, request.word_separator)
    templates = {}
    for where, row in read():
        found = chat_of(row, where, options.form)
        with_tools = bool(found.tools)
        if with_tools not in templates:
            templates[with_tools] = load_template(
                encoder, options.chat_template, options.template_arguments, with_tools
            )
        encoded = encode_chat(templates[with_tools], tokenizer, found, options.loss)
        yield _sample(encoded, measure, scores_first=request.bos == "each_window")
    counts.remarks += options.notes
    if any(template.uses_date for template in templates.values()):
        counts.remarks.append(
            "the chat template writes today's date into chats, so the number changes from day to day; most "
            "take dataset.template_arguments.date_string instead"
        )
    if any(template.has_no_prompt for template in templates.values()):
        counts.remarks.append(
            "the chat template has no generation prompt, so the header of the assistant's turns is scored as "
            "part of them; {% generation %} in the template would say what is generated"
        )


def _sample(encoded: EncodedChat, measure: Measure | None, *, scores_first: bool) -> Sample:
    ids, trained = encoded.ids, encoded.trained
    labels = np.where(trained, ids, CROSS_ENTROPY_IGNORE_IDX)
    sizes = None if measure is None else measure.sizes(ids, 0, "", encoded.text, START)
    if sizes is None:
        return Sample(ids, labels)
    is_target = trained.copy()
    is_target[:1] &= scores_first
    return Sample(ids, labels, _sizes_of_targets(sizes[:, :-1], is_target))


def _sizes_of_targets(sizes: Ids, is_target: Any) -> Ids:
    """Leave bytes and words of targets; ``Sample.sizes`` has its first word less, as a text has."""
    sizes = np.where(is_target, sizes, 0)
    with_words = np.flatnonzero(sizes[1])
    sizes[1, with_words[:1]] -= 1
    return sizes


def chat_of(row: Any, where: str, form: str | None = None) -> Chat:
    """Return the chat that a row holds.

    Args:
        row: its columns.
        where: where it was read, for messages.
        form: one of ``FORMS``; None for the only one that its columns fit.

    Raises:
        ValueError: if no form fits, several do, or a message lacks something.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{where} is {type(row).__name__}, not an object with columns")
    row = {key: value for key, value in row.items() if value is not None}
    fitting = [name for name, known in FORMS.items() if set(known.columns) <= set(row)]
    if form is not None and form not in fitting:
        raise ValueError(
            f"dataset.form is {form!r}, which takes the columns {', '.join(FORMS[form].columns)}; {where} "
            f"has: {', '.join(map(str, row))}"
        )
    if form is None and len(fitting) != 1:
        known = "; ".join(f"{name}: {', '.join(known.columns)}" for name, known in FORMS.items())
        found = f"fits the forms {', '.join(fitting)}; choose one" if fitting else "fits no form of a chat"
        raise ValueError(
            f"{where} (columns: {', '.join(map(str, row))}) {found} by dataset.form. The forms are {known}"
        )
    try:
        messages = FORMS[form or fitting[0]].read(row)
    except (KeyError, TypeError, ValueError) as error:
        why = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{where}: a message {why}") from error
    if not messages:
        raise ValueError(f"{where}: the chat has no messages")
    system = row.get("system")
    if isinstance(system, str) and system and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": system}, *messages]
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = json.loads(tools) if tools.strip() else None
    return Chat(messages, list(tools) if tools else None, where)


@dataclass(frozen=True)
class _Form:
    columns: tuple[str, ...]
    read: Callable[[Row], Messages]


def _role_and_content(messages: Any) -> Messages:
    if isinstance(messages, str):
        messages = json.loads(messages)
    found = [dict(message) for message in messages]
    for message in found:
        message["role"]
    return found


def _from_and_value(messages: Any) -> Messages:
    found = []
    for message in json.loads(messages) if isinstance(messages, str) else messages:
        if "role" in message:
            found.append(dict(message))
            continue
        who = message["from"]
        if who not in _ROLES:
            raise ValueError(f"is from {who!r}; known: {', '.join(_ROLES)}")
        found.append({"role": _ROLES[who], "content": message["value"]})
    return found


def _prompt_and_completion(row: Row) -> Messages:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) != isinstance(completion, str):
        raise ValueError("is a text and the other is not, in prompt and completion")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    return _role_and_content([*prompt, *completion])


def _instruction_and_output(row: Row) -> Messages:
    found: Messages = []
    for asked, answered in row.get("history") or ():
        found += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    asked = "\n".join(part for part in (row["instruction"], row.get("input")) if part)
    return [*found, {"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]


FORMS = {
    "messages": _Form(("messages",), lambda row: _role_and_content(row["messages"])),
    "conversations": _Form(("conversations",), lambda row: _from_and_value(row["conversations"])),
    "prompt_completion": _Form(("prompt", "completion"), _prompt_and_completion),
    "instruction": _Form(("instruction", "output"), _instruction_and_output),
}
