"""Documents as lm-evaluation-harness has them: its task says what is scored and what it is divided by.

The pages, their detokenisation and the counts of words and bytes come out of lm-eval's own task object. Only
the cut of a local WikiText file into pages is made here, because lm-eval's wikitext task expects a data set
that is cut already.
"""

import functools
import logging
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ppl_eval.data.documents import Part
from ppl_eval.data.input_files import expand_paths, stamp_of
from ppl_eval.data.plain_text import decoded
from ppl_eval.data.text_sources import TextSource, source_of_parts
from ppl_eval.tokenization.word_count import count_words


def lm_eval_task(task: str = "wikitext", paths: str | Sequence[str] | None = None) -> TextSource:
    """The documents of an lm-eval task of the kind ``loglikelihood_rolling``.

    With the protocol ``rolling``, ``word_perplexity``, ``byte_perplexity`` and ``bits_per_byte`` are those of
    ``lm_eval --tasks <task>`` for the same tokenizer, window length and dtype.

    Args:
        task: name of the task, as ``lm_eval ls tasks`` lists it.
        paths: text files in the form of WikiText (``wiki.test.raw``), in the place of the data set that the
            task would download; for tasks whose documents have a ``page``.

    Raises:
        ValueError: if a path names no file; when it is read, if the task does not exist, is of another kind,
            cannot be downloaded, or divides by something else than words and bytes of a text.
    """
    named = None if paths is None else expand_paths(paths)
    files = None if named is None else named.files
    # Another lm-eval may detokenise the same file in another way: no cache may take one for the other.
    parameters: dict[str, Any] = {"task": task, "lm_eval": version("lm_eval")}
    if named is not None:
        parameters |= named.parameters()
    load = functools.cache(lambda: _load(task, files))

    def read_parts(notes: list[str]) -> Iterator[Part]:
        notes += [] if named is None else named.notes()
        loaded = load()
        for doc in loaded.eval_docs:
            yield _part(loaded, doc)

    return source_of_parts(
        "lm_eval_task", parameters, read_parts, lambda: None if files is None else stamp_of(files)
    )


def wikitext_pages(text: str) -> list[str]:
    """Cut a WikiText file into pages, as in the data set EleutherAI/wikitext_document_level.

    A page begins at each title line; the line feed between two pages belongs to neither, and pages of white
    space alone are left out, except at the end of the text.
    """
    pages: list[str] = []
    lines: list[str] = []
    for line in text.split("\n"):
        if _is_title(line):
            page = "\n".join(lines)
            if page.strip():
                pages.append(page)
            lines = []
        lines.append(line)
    return [*pages, "\n".join(lines)]


def _is_title(line: str) -> bool:
    # The markers of sections, " = = Career = = ", run together first, so that only " = Page = " is a title.
    joined = line.replace("= = =", "===").replace("= =", "==").strip()
    return joined.startswith("= ") and joined.endswith(" =")


def _load(name: str, files: list[Path] | None) -> Any:
    # Its remarks are about the task's file, which is lm-eval's own.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = _manager_of(name)
    if name not in manager.all_subtasks:
        raise ValueError(
            f"dataset.task is {name!r}, which lm-eval does not know; `lm_eval ls tasks` lists them"
        )
    spec: Any = name
    if files is not None:
        # In a group, so that lm-eval takes the task that it knows and changes this one key.
        local = {"task": name, "custom_dataset": functools.partial(_local_pages, files)}
        spec = {"group": "local", "task": [local]}
    try:
        task = manager.load([spec])["tasks"][name]
    except Exception as error:  # the hub's, the data set's and the template's errors have no common base
        if files is not None:
            raise _needs_other_fields(name, f"{type(error).__name__}: {error}") from error
        raise ValueError(
            f"lm-eval could not load its task {name!r}: {error}; without a network, give dataset.paths with "
            "local files (for tasks whose documents are pages, such as wikitext)"
        ) from error
    _check_kind(task)
    if files is not None:
        _check_fields(task)
    return task


def _check_fields(task: Any) -> None:
    """Refuse a task that does not read the pages it is given: lm-eval scores the name of a field that a
    document does not have, letter by letter.
    """
    try:
        read = task.doc_to_target({"page": "a"}) != task.doc_to_target({"page": "b"})
    except Exception as error:  # a task's functions and templates raise what they like
        raise _needs_other_fields(task.task_name, f"{type(error).__name__}: {error}") from error
    if not read:
        raise _needs_other_fields(task.task_name, "what it scores does not depend on them")


def _needs_other_fields(name: str, why: str) -> ValueError:
    return ValueError(
        f"lm-eval's task {name!r} cannot be given dataset.paths ({why}). Local files are pages: splits "
        "train, validation and test of documents with the one field 'page', as the task wikitext has them. "
        "Leave dataset.paths out, or score your files with ppl_eval.data.text_files"
    )


def _check_kind(task: Any) -> None:
    if task.OUTPUT_TYPE != "loglikelihood_rolling":
        raise ValueError(
            f"lm-eval's task {task.task_name!r} is of the kind {task.OUTPUT_TYPE}, which measures no "
            "perplexity of whole documents; use one of the kind loglikelihood_rolling, such as wikitext"
        )


def _manager_of(name: str) -> Any:
    from lm_eval import tasks

    # Reading thousands of task files takes half a minute; most tasks have a folder of their name.
    folder = Path(tasks.__file__).parent / name
    if folder.is_dir():
        manager = tasks.TaskManager(include_defaults=False, include_path=str(folder))
        if name in manager.all_subtasks:
            return manager
    return tasks.TaskManager()


def _local_pages(files: list[Path], **_: Any) -> Any:
    from datasets import Dataset

    pages = [page for file in files for page in wikitext_pages("".join(decoded(file)))]
    rows = Dataset.from_dict({"page": pages})
    # The task takes the split that it evaluates, and looks at others only for examples, of which it has none.
    return {"train": rows, "validation": rows, "test": rows}


def _part(task: Any, doc: dict[str, Any]) -> Part:
    # The task itself says what lm-eval divides by; one of the texts that it may have counted has that size.
    text = task.doc_to_target(doc)
    counted = task.process_results(doc, [0.0])
    wanted = {
        metric: counted[metric][1] for metric in ("word_perplexity", "byte_perplexity") if metric in counted
    }
    for original in (text, *(value for value in doc.values() if isinstance(value, str))):
        ours = {"word_perplexity": count_words(original), "byte_perplexity": len(original.encode())}
        if all(ours[metric] == number for metric, number in wanted.items()):
            return Part(text, original=None if original == text else original)
    raise ValueError(
        f"lm-eval's task {task.task_name!r} divides by {wanted}, which is the size of no text in its "
        "document: this tool cannot reproduce its figures"
    )
