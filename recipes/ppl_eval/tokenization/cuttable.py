"""Which tokenizers of a ``tokenizer.json`` allow a long text to be cut (see ``chunking``).

The parts of a text around a place must depend on a few characters around that place, so that a scan that
begins elsewhere falls into step. Expressions that look for a closing mark have no such property:
``"[^"]*"|[^"]+`` swaps inside and outside when it begins between quotes. So an expression allows a cut only
where it is a run of one class of characters, or one of the published ones, all of whose alternatives are such
runs with a few characters around them.
"""

import re
from collections.abc import Iterator
from typing import Any

# Pre-tokenizers whose cuts depend on the characters beside them.
_LOCAL_STEPS = frozenset(
    {"BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation", "Sequence"}
    | {"UnicodeScripts", "Whitespace", "WhitespaceSplit"}
)
_CLASS = (
    r"(?:\[\^?(?:\\[pP]\{\w+\}|\\[sSdDwWrntfv\\\[\]/.,:;!?-]|[^\\\[\]&^])+\]"
    r"|\\[pP]\{\w+\}|\\[sSdDwWrnt]|[^\\\[\](){}.*+?|^$])"
)
# A class, once or in a run, perhaps with a space before it.
_RUN_OF_ONE_CLASS = re.compile(rf"(?: \?|\\s\?)?{_CLASS}(?:\+|\{{\d+(?:,\d*)?\}})?")

_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2_SUFFIXES = r"'s|'t|'re|'ve|'m|'ll|'d"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_DEEPSEEK_MARK = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""


def _published() -> Iterator[str]:
    # GPT-2 in three spellings; CLIP.
    yield rf"{_GPT2_SUFFIXES}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
    yield rf"{_GPT2_SUFFIXES}| ?[\p{{L}}]+| ?[\p{{N}}]+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
    yield r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    yield rf"{_GPT2_SUFFIXES}|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}]+"
    for number in (r"\p{N}", r"\p{N}{1,3}"):
        # Qwen2 and 3 (digits one by one); GPT-4, Llama 3, OLMo 2, Phi-4 (in threes).
        marks = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
        yield rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}|{marks}|{_SPACE}"
        # Qwen3.5: accents belong to their letters.
        marks = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        yield rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|{number}|{marks}|{_SPACE}"
        # Mistral's Tekken, Nemotron 3 (no suffixes); GPT-4o, gpt-oss, Llama 4.
        for suffix in ("", f"{_SUFFIXES}?"):
            first = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{suffix}"
            second = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{suffix}"
            yield rf"{first}|{second}|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
    # DeepSeek V3 and R1: the last of three steps; the others are runs of one class.
    words = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    yield rf"{_DEEPSEEK_MARK}|{words}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}"
    # Falcon; BLOOM.
    yield "[0-9][0-9][0-9]"
    yield r" ?[^(\s|[.,!?…。，、।۔،])]+"


_PUBLISHED = frozenset(_published())


def why_one_call(description: dict[str, Any]) -> str | None:
    """Return what in a ``tokenizer.json`` forbids cutting; None if a text may be cut."""
    model = description["model"]
    if model.get("dropout"):
        return "its merges are dropped at random"
    if model["type"] == "Unigram":
        return "a unigram model weighs the whole text at once"
    for step in _steps(description.get("normalizer"), "normalizers"):
        if step["type"] == "Replace" and not _is_local(step["pattern"]):
            return f"matches of its normalizer's {_shown(step)} may depend on far text"
    for step in _steps(description["pre_tokenizer"], "pretokenizers"):
        if step["type"] == "Split":
            if not _is_local_split(step):
                return f"matches of its pre-tokenizer's {_shown(step)} may depend on far text"
        elif step["type"] not in _LOCAL_STEPS:
            return f"its pre-tokenizer {step['type']} may count from the head of the text"
    return None


def _steps(step: dict[str, Any] | None, children: str) -> Iterator[dict[str, Any]]:
    if step is not None:
        yield step
        for child in step.get(children, []):
            yield from _steps(child, children)


def _is_local(pattern: dict[str, str]) -> bool:
    if "Regex" in pattern:
        return _RUN_OF_ONE_CLASS.fullmatch(pattern["Regex"]) is not None
    return len(pattern["String"]) == 1


def _is_local_split(step: dict[str, Any]) -> bool:
    """Return whether a ``Split`` cuts by the characters beside the cut.

    One class of characters does so whatever becomes of the matches. A published expression does where its
    matches stay by themselves: ``Isolated``, or, in an older spelling, the text between matches ``Removed``.
    """
    alone = step["behavior"] == "Isolated" or (step["behavior"] == "Removed" and step["invert"])
    return _is_local(step["pattern"]) or (alone and step["pattern"].get("Regex") in _PUBLISHED)


def _shown(step: dict[str, Any]) -> str:
    return f"{step['type']} {next(iter(step['pattern'].values()))!r}"
