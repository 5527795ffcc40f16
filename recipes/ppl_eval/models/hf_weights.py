"""A checkpoint's tensors under the names of transformers' modules, by the library's own conversion table.

transformers joins tensors while it loads: the experts of a mixture become one tensor, some names changed over
time. Its table (``get_model_conversion_mapping``) and its operations are used as they are; what is ours is
that nothing is read before it is asked for. Names of the table are not public, hence the range in
pyproject.toml.
"""

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

from torch import Tensor

Reader = Callable[[str], Callable[[], Tensor]]
Weights = dict[str, tuple[Tensor, Callable[[], Tensor]]]


def under_module_names(model: Any, meta: Mapping[str, Tensor], reader: Reader) -> tuple[Weights, list[str]]:
    """Rename and join the tensors of a checkpoint.

    Args:
        model: transformers' model, on the meta device or not.
        meta: shape and dtype of each tensor of the checkpoint.
        reader: returns the function that reads one of them.

    Returns:
        Meta tensor and function that reads, by name, and notes. A tensor that has no place in the model keeps
        its name, for the comparison with the model to report it.

    Raises:
        ValueError: if the table does not fit the tensors.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    wanted = model.state_dict()
    weights: Weights = {}
    joined: dict[str, list[tuple[str, str]]] = {}
    # Experts are joined in the order of their numbers.
    for name in sorted(meta, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if renamed not in wanted and name in wanted:
            renamed, pattern = name, None
        if pattern is not None and renamed in wanted:
            joined.setdefault(renamed, []).append((name, pattern))
        else:
            weights[renamed if renamed in wanted else name] = meta[name], reader(name)
    for target, parts in joined.items():
        convert = partial(_convert, model, of_pattern[parts[0][1]], target, parts)
        try:
            made = convert(lambda name: lambda: meta[name])
        except Exception as error:  # what an operation raises for shapes that it does not expect
            names = ", ".join(name for name, _ in parts[:3])
            raise ValueError(f"transformers cannot join {names}, ... to {target}: {error}") from error
        for name, tensor in made.items():
            weights[name] = tensor, partial(_read, convert, reader, name)
    return weights, _drop_ignored(model, weights, wanted)


def _convert(
    model: Any, converter: Any, target: str, parts: list[tuple[str, str]], reader: Reader
) -> dict[str, Tensor]:
    # A converter collects tensors, and gives them up when it converts.
    mapping = deepcopy(converter)
    for name, pattern in parts:
        mapping.add_tensor(target, name, pattern, reader(name))
    made = mapping.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _read(convert: Callable[[Reader], dict[str, Tensor]], reader: Reader, name: str) -> Tensor:
    return convert(reader)[name]


def _drop_ignored(model: Any, weights: Weights, wanted: Mapping[str, Tensor]) -> list[str]:
    """Leave out what transformers leaves out of checkpoints of this model, such as old rotary tables."""
    patterns = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    extra = [n for n in weights if n not in wanted and any(p.search(n) for p in patterns)]
    for name in extra:
        del weights[name]
    if not extra:
        return []
    return [f"{len(extra)} tensors that transformers does not load were left out: {', '.join(extra[:3])}"]
