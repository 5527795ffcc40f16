"""Chats by a tokenizer's template: the tokens and the mask of transformers' ``apply_chat_template``."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX as MASKED
from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer

from helpers.sources import tokens_of
from ppl_eval import protocols
from ppl_eval.config import own_code
from ppl_eval.data import chat, domains
from ppl_eval.data.chats import chat_of
from ppl_eval.data.token_data import TokenData
from ppl_eval.metrics.denominators import covered_text
from ppl_eval.protocols.plan import make_plan
from ppl_eval.tokenization.tokenizer import TextEncoder, wrap_tokenizer

CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{%- for message in messages -%}<|im_start|>{{ message.role }}\n"
    "{%- if message.role == 'assistant' -%}\n"
    "{% generation %} {{ message.reasoning_content }}{{ message.content }}<|im_end|>{% endgeneration %}\n"
    "{%- else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
CHATS = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello there, naïve 漢字 🙂."},
        {"role": "user", "content": "the end?"},
        {"role": "assistant", "content": "Yes."},
    ],
    [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "weather", "arguments": {"day": 1}}]},
        {"role": "tool", "content": "rain <|im_end|>"},
        {"role": "assistant", "content": "It rains.", "reasoning": "so wet"},
    ],
    [{"role": "user", "content": "only a question"}],
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"day": "int"}}}]


@pytest.fixture(scope="module")
def folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((smollm2 / name).read_text())
    return folder


def encoder_of(folder: Path, template: str | None = None) -> TextEncoder:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    section = {
        "tokenizer_json_path": str(folder / "tokenizer.json"),
        "tokenizer_config_json_path": str(folder / "tokenizer_config.json"),
    }
    return wrap_tokenizer(HuggingFaceBaseTokenizer(**section), section)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def made(source: Any, encoder: TextEncoder, cache: Path) -> TokenData:
    return tokens_of(source, encoder, cache, bos="tokenizer")


def samples(data: TokenData) -> list[tuple[list[int], list[int]]]:
    bounds = data.offsets_D1.tolist()
    return [(data.tokens[a:b].tolist(), data.labels[a:b].tolist()) for a, b in itertools.pairwise(bounds)]


def theirs(folder: Path, template: str, **options: Any) -> list[dict[str, list[int]]]:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return [
        tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=True, return_dict=True, tools=tools, **options
        )
        for messages, tools in zip(CHATS, (None, TOOLS, None), strict=True)
    ]


def rows() -> list[dict[str, Any]]:
    return [{"messages": CHATS[0]}, {"messages": CHATS[1], "tools": TOOLS}, {"messages": CHATS[2]}]


@pytest.mark.parametrize("place", ["config", "jinja", "argument"])
def test_marked_turns_are_those_of_transformers(folder: Path, tmp_path: Path, place: str) -> None:
    jinja = folder / "chat_template.jinja"
    arguments = {}
    # A file beside the tokenizer goes before its configuration, one that is named before both.
    encoder = encoder_of(folder, MARKED if place == "config" else CHATML)
    if place == "jinja":
        jinja.write_text(MARKED)
    elif place == "argument":
        jinja.write_text(CHATML)
        (tmp_path / "own.jinja").write_text(MARKED)
        arguments = {"chat_template": str(tmp_path / "own.jinja")}
    try:
        paths = write_rows(tmp_path / "chats.jsonl", rows())
        data = made(chat(paths, **arguments), encoder, tmp_path / "cache")
        last = made(chat(paths, loss="last", **arguments), encoder, tmp_path / "cache")
    finally:
        jinja.unlink(missing_ok=True)
    expected = theirs(folder, MARKED, return_assistant_tokens_mask=True)
    assert sum(sum(found["assistant_masks"]) for found in expected) > 20
    for (tokens, labels), found in zip(samples(data), expected, strict=True):
        assert tokens == found["input_ids"]
        mask = np.array(found["assistant_masks"], dtype=bool)
        assert labels == np.where(mask, tokens, MASKED).tolist()
    for (_, labels), (_, every) in zip(samples(last), samples(data), strict=True):
        kept = np.flatnonzero(np.array(every) != MASKED)
        runs = np.split(kept, np.flatnonzero(np.diff(kept) > 1) + 1)
        assert np.flatnonzero(np.array(labels) != MASKED).tolist() == runs[-1].tolist()
    assert any("1 samples have no token to score" in note for note in data.notes)


@pytest.mark.parametrize("loss", ["assistant", "last", "all"])
def test_turns_by_prefixes(folder: Path, tmp_path: Path, loss: str) -> None:
    from transformers import PreTrainedTokenizerFast

    encoder = encoder_of(folder, CHATML)
    data = made(chat(write_rows(tmp_path / "c.jsonl", rows()), loss=loss), encoder, tmp_path / "cache")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    for (tokens, labels), whole, messages, tools in zip(
        samples(data), theirs(folder, CHATML), CHATS, (None, TOOLS, None), strict=True
    ):
        assert tokens == whole["input_ids"]
        expected = [MASKED] * len(tokens)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for turn in turns[-1:] if loss == "last" else turns:
            begin, end = (
                len(
                    tokenizer.apply_chat_template(
                        messages[:count], chat_template=CHATML, tools=tools, add_generation_prompt=prompt
                    )["input_ids"]
                )
                for count, prompt in ((turn, True), (turn + 1, False))
            )
            expected[begin:end] = tokens[begin:end]
        assert labels == (tokens if loss == "all" else expected)


def test_bytes_and_words_are_those_of_what_is_trained(folder: Path, tmp_path: Path) -> None:
    encoder = encoder_of(folder, CHATML)
    # Chats of the same text as `messages`, by hand.
    trained = [["Hello there, naïve 漢字 🙂.<|im_end|>\n", "Yes.<|im_end|>\n"], ["fine two<|im_end|>\n"]]
    words = [5 + 1, 2]
    chats = [{"messages": CHATS[0]}, {"prompt": "How?", "completion": "fine two"}]
    data = made(chat(write_rows(tmp_path / "c.jsonl", chats)), encoder, tmp_path / "cache")
    assert data.num_bytes_D.tolist() == [sum(len(part.encode()) for part in parts) for parts in trained]
    plan = make_plan(protocols.per_sample(256), data.offsets_D1, 1)
    covered = covered_text(plan, data)
    assert covered is not None
    assert (covered.num_bytes_D.tolist(), covered.of) == (
        data.num_bytes_D.tolist(),
        "scored parts of samples",
    )
    # Emoji and Chinese are words of their own only by white space.
    assert covered.num_words_D.tolist() == words
    assert int(np.sum(data.token_bytes)) == int(data.num_bytes_D.sum())
    unscored = np.asarray(data.labels) == MASKED
    assert not np.asarray(data.token_bytes)[unscored].any()


FORMS = [
    {"messages": [{"role": "user", "content": "Add.\n1"}, {"role": "assistant", "content": "2"}]},
    {"conversations": [{"from": "human", "value": "Add.\n1"}, {"from": "gpt", "value": "2"}]},
    {"conversations": [{"role": "user", "content": "Add.\n1"}, {"role": "assistant", "content": "2"}]},
    {"prompt": "Add.\n1", "completion": "2", "id": 7},
    {
        "prompt": [{"role": "user", "content": "Add.\n1"}],
        "completion": [{"role": "assistant", "content": "2"}],
    },
    {"instruction": "Add.", "input": "1", "output": "2"},
    {"instruction": "Add.\n1", "input": "", "output": "2"},
]


def test_forms_of_one_chat_are_one_chat(folder: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    encoder = encoder_of(folder, CHATML)
    data = made(chat(write_rows(tmp_path / "all.jsonl", FORMS)), encoder, tmp_path / "cache")
    (tmp_path / "list.json").write_text(json.dumps(FORMS[:1]))
    pq.write_table(pa.Table.from_pylist(FORMS[:1]), tmp_path / "one.parquet")
    others = [
        made(chat(str(tmp_path / name)), encoder, tmp_path / "cache") for name in ("list.json", "one.parquet")
    ]
    found = [sample for each in (data, *others) for sample in samples(each)]
    assert len(found) == len(FORMS) + 2
    assert all(sample == found[0] for sample in found)
    assert encoder.tokenizer.tokenizer.decode(found[0][0], skip_special_tokens=False) == (
        "<|im_start|>user\nAdd.\n1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    )


def test_system_tools_and_history() -> None:
    found = chat_of(
        {
            "system": "Be brief.",
            "tools": json.dumps(TOOLS),
            "instruction": "b",
            "output": "B",
            "history": [["a", "A"]],
        },
        "row 1",
    )
    assert [message["role"] for message in found.messages] == ["system", *("user", "assistant") * 2]
    assert [message["content"] for message in found.messages] == ["Be brief.", "a", "A", "b", "B"]
    assert found.tools == TOOLS
    shared = chat_of({"conversations": [{"from": "observation", "value": "x"}]}, "row 2")
    assert shared.messages == [{"role": "tool", "content": "x"}]


def test_rows_that_are_no_chat_are_refused() -> None:
    for row, why in (
        ({"text": "a"}, r"row 3 \(columns: text\) fits no form of a chat.*The forms are messages: messages"),
        ({**FORMS[0], **FORMS[3]}, r"fits the forms messages, prompt_completion; choose one by dataset.form"),
        ({"conversations": [{"from": "parrot", "value": "a"}]}, "row 3: a message is from 'parrot'; known"),
        ({"messages": [{"content": "a"}]}, "row 3: a message lacks 'role'"),
        ({"messages": []}, "row 3: the chat has no messages"),
        ({"prompt": "a", "completion": []}, "a text and the other is not"),
    ):
        with pytest.raises(ValueError, match=why):
            chat_of(row, "row 3")
    assert chat_of({**FORMS[0], **FORMS[3]}, "row 3", "prompt_completion").messages[1]["content"] == "2"
    with pytest.raises(ValueError, match="takes the columns prompt, completion; row 3 has: messages"):
        chat_of(FORMS[0], "row 3", "prompt_completion")


def refused(encoder: TextEncoder, tmp_path: Path, **arguments: Any) -> str:
    with pytest.raises(ValueError) as caught:
        made(chat(write_rows(tmp_path / "c.jsonl", rows()[:1]), **arguments), encoder, tmp_path / "cache")
    return str(caught.value)


def test_prefixes_that_disagree_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    # As templates do that leave the reasoning of all but the last turn out.
    thinking = "{{ 'think' if loop.last and message.role == 'assistant' }}{{ message.content }}"
    template = CHATML.replace("{{ message.content }}", thinking)
    said = refused(encoder_of(folder, template), tmp_path)
    assert "c.jsonl line 1: the chat template makes of the first 3 of 5 messages" in said
    assert "mark them in the template with {% generation %}" in said
    encoder = encoder_of(folder, template)
    paths = write_rows(tmp_path / "c.jsonl", rows()[:1])
    # The last turn can be told even so, and all turns.
    assert samples(made(chat(paths, loss="last"), encoder, tmp_path / "cache"))
    # A token goes across the border: the generation prompt ends with a space, which begins the next word.
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    said = refused(encoder_of(folder, template), tmp_path)
    assert (
        "a token of the chat goes across the end of the first 2 of 5 messages with a generation prompt"
        in said
    )


def test_templates_run_in_a_sandbox(folder: Path, tmp_path: Path) -> None:
    for template, why in (
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ raise_exception('only two roles') }}", "line 1: the chat template refuses it: only two roles"),
        ("{% for %}", "no valid Jinja template"),
        ("{% include '/etc/passwd' %}", "refuses it"),
    ):
        assert why in refused(encoder_of(folder, template), tmp_path)
    assert "has no chat template" in refused(encoder_of(folder), tmp_path)


def test_what_the_template_is_given(folder: Path, tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ strftime_now('%Y') if not date }}{{ date }}{{ missing_token }}\n"
    paths = write_rows(tmp_path / "c.jsonl", rows()[:1])
    encoder = encoder_of(folder, template)
    dated = made(chat(paths, loss="all"), encoder, tmp_path / "cache")
    assert any("today's date" in note for note in dated.notes)
    fixed = made(chat(paths, loss="all", template_arguments={"date": "May"}), encoder, tmp_path / "cache")
    assert not any("today's date" in note for note in fixed.notes)
    assert encoder.tokenizer.tokenizer.decode(samples(fixed)[0][0], skip_special_tokens=False) == (
        "<|im_start|>May\n".removesuffix("\n")
    )


def test_a_template_without_a_generation_prompt_is_noted(folder: Path, tmp_path: Path) -> None:
    template = CHATML.removesuffix("{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    data = made(
        chat(write_rows(tmp_path / "c.jsonl", rows()[:1])), encoder_of(folder, template), tmp_path / "cache"
    )
    assert any("has no generation prompt" in note for note in data.notes)


@pytest.fixture
def helpers_allowed() -> Iterator[None]:
    """As after ``allow_components=helpers`` on the command line."""
    own_code.allow(["helpers"])
    yield
    own_code.allow([])


@pytest.mark.usefixtures("helpers_allowed")
def test_chats_are_domains_beside_other_samples(folder: Path, tmp_path: Path) -> None:
    encoder = encoder_of(folder, CHATML)
    paths = write_rows(tmp_path / "c.jsonl", rows())
    sample = {"tokens": [3, 4, 5], "labels": [3, 4, 5]}
    source = domains(
        {
            "chats": {"_component_": "ppl_eval.data.chat", "paths": paths},
            "lists": {
                "_component_": "ppl_eval.data.sft",
                "dataset": {"_component_": "helpers.own_components.list_dataset", "samples": [sample]},
            },
        }
    )
    data = made(source, encoder, tmp_path / "cache")
    assert data.domains == ("chats", "lists")
    assert data.num_bytes_D is None
    assert samples(data)[-1] == ([3, 4, 5], [3, 4, 5])


def test_arguments_that_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dataset.loss is 'user'; allowed: assistant, last, all"):
        chat("x", loss="user")
    with pytest.raises(ValueError, match="either paths"):
        chat()
    with pytest.raises(ValueError, match=r"dataset.split is missing"):
        chat(name="someone/chats")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match="is no table"):
        chat(str(tmp_path / "a.txt"))
