"""The tokenizer of a model's folder, as a config's ``tokenizer`` section."""

from pathlib import Path
from typing import Any

_COMPONENT = "torchtune.modules.transforms.tokenizers.HuggingFaceBaseTokenizer"
# Files of other forms, and what makes a tokenizer.json of them.
_OTHERS = {
    "tekken.json": "Mistral's tekken form: take the folder in transformers' form, which has a tokenizer.json",
    "tokenizer.model": (
        "a SentencePiece or tiktoken model: transformers writes a tokenizer.json beside it by"
        " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    ),
    "vocab.json": (
        "a vocabulary with merges: transformers writes a tokenizer.json beside it by"
        " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    ),
}


def tokenizer_section(folder: Path) -> dict[str, Any]:
    """Return the section that builds a folder's tokenizer.

    BOS and EOS come from tokenizer_config.json, or from generation_config.json where that is missing.

    Args:
        folder: as transformers writes it.

    Raises:
        ValueError: if there is no tokenizer.json, or neither of the two others; with what is there instead.
    """
    if not (folder / "tokenizer.json").is_file():
        other = next((name for name in (*_OTHERS, "spiece.model") if (folder / name).is_file()), None)
        hint = f"; {other} is {_OTHERS.get(other, _OTHERS['tokenizer.model'])}" if other else ""
        raise ValueError(
            f"{folder} has no tokenizer.json{hint}. A tokenizer of another form can be named in the config's"
            " section tokenizer (docs/data.md)"
        )
    section = {"_component_": _COMPONENT, "tokenizer_json_path": str(folder / "tokenizer.json")}
    for name in ("tokenizer_config", "generation_config"):
        if (folder / f"{name}.json").is_file():
            key = "generation_config_path" if name == "generation_config" else f"{name}_json_path"
            return {**section, key: str(folder / f"{name}.json")}
    raise ValueError(
        f"{folder} has no tokenizer_config.json, which says what BOS and EOS are, and no"
        " generation_config.json either; copy it from where the model is published"
    )
