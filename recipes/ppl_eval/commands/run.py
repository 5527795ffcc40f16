"""``ppl-eval run``: a number in one line, from a config, or without YAML from a model folder and a text."""

import argparse
import sys
from pathlib import Path
from typing import Any

from ppl_eval.config.files import read_json_object
from ppl_eval.tokenization.folder import tokenizer_section

_LONGEST = 2048


def add_run(commands: Any) -> None:
    """Add the sub-command."""
    run = commands.add_parser(
        "run",
        help="evaluate in this process and print the number in one line",
        usage=(
            "ppl-eval run CONFIG [key=value ...]\n"
            "       ppl-eval run MODEL_FOLDER TEXT_FILE ... [key=value ...]"
        ),
        description=(
            "CONFIG is a path or a name of `ppl-eval ls`. MODEL_FOLDER holds config.json, *.safetensors and"
            f" tokenizer.json; the text is cut into windows of {_LONGEST:,} tokens, or what the model allows,"
            " and scored in float32. Everything can be changed by key=value. For several processes: ppl-eval"
            " launch."
        ),
    )
    run.add_argument("target", help="a config, or a model's folder")
    run.add_argument("rest", nargs="*", metavar="text file or key=value", help="see above")
    run.add_argument("--table", action="store_true", help="print the whole table")
    run.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> None:
    from ppl_eval.api.evaluation import evaluate
    from ppl_eval.distributed.embedded import EvaluationError

    texts = [text for text in arguments.rest if "=" not in text and not text.startswith("~")]
    overrides = [text for text in arguments.rest if text not in texts]
    folder = Path(arguments.target)
    config: Any = arguments.target
    if folder.is_dir():
        if not texts:
            raise ValueError(f"{folder} is a model's folder; name the text to score it on after it")
        config = config_of(folder, texts)
    elif texts:
        raise ValueError(f"cannot read the argument {texts[0]!r}; after a config come key=value or ~key")
    try:
        result = evaluate(config, overrides=overrides)
    except EvaluationError as error:
        raise ValueError(str(error)) from error
    print(result.table() if arguments.table else result)
    for note in () if arguments.table else result["notes"]:
        print(f"note: {note}", file=sys.stderr)


def config_of(folder: Path, texts: list[str]) -> dict[str, Any]:
    """Return the config that scores texts with the model of a Hugging Face style folder.

    Args:
        folder: with config.json, weights and tokenizer.json.
        texts: files or globs of text; each file is a document.

    Raises:
        ValueError: if a file is missing, or neither engine computes this model.
    """

    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} has no config.json; a model's folder must be as transformers writes it. Others can be"
            " described by a config (docs/config.md)"
        )
    weights = sorted(path.name for path in folder.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"{folder} has no *.safetensors; other checkpoints can be described by a config")
    described = read_json_object(folder / "config.json")
    model, model_type, max_seq_len = _engine(folder, described)
    return {
        "model": model,
        "tokenizer": tokenizer_section(folder),
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(folder),
            "checkpoint_files": weights,
            "model_type": model_type,
        },
        "dataset": {"_component_": "ppl_eval.data.text_files", "paths": texts},
        "protocol": {
            "_component_": "ppl_eval.protocols.disjoint",
            "max_seq_len": min(_LONGEST, max_seq_len),
        },
        "dtype": "fp32",
    }


def _engine(folder: Path, described: dict[str, Any]) -> tuple[dict[str, Any], str, int]:
    """Return the section ``model``, the checkpointer's ``model_type``, and the model's context."""
    from ppl_eval.models.other_engine import torchtune_section, transformers_section

    own = torchtune_section(described)
    if own is not None:
        return *own, own[0]["max_seq_len"]
    return *transformers_section(folder), int(described.get("max_position_embeddings") or _LONGEST)
