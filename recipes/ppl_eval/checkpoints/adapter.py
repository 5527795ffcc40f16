"""LoRA adapters, merged into the weights while they are read.

Two forms: torchtune's own (``adapter_model.pt``, its names, its row order) and PEFT's
(``adapter_model.safetensors``, Hugging Face's). The merge is done by torchtune's function, so the result has
the bits of the checkpoint that training wrote.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torchtune.modules.peft import get_merged_lora_ckpt

from ppl_eval.checkpoints.adapter_config import Scaling, read_scaling
from ppl_eval.checkpoints.folder import ADAPTER_FILES
from ppl_eval.checkpoints.lazy_state_dict import LazyStateDict, name_some
from ppl_eval.checkpoints.safetensors import StoredTensor, read_safetensors
from ppl_eval.checkpoints.torch_files import index_torch_file
from ppl_eval.models.converters import head_layout
from ppl_eval.models.families import family_of_model_type
from ppl_eval.models.hf_config import HFConfig

PEFT_PREFIX = "base_model.model."
PROBED_LAYERS = 8
# A merged weight W0 + D projects onto D as 1 + noise, an unmerged one as 0 + noise; see `already_merged`.
MERGED_TOLERANCE = 0.25


class Pair(NamedTuple):
    """The two factors of one layer's update, in torchtune's row order; ``magnitude`` for DoRA.

    ``module`` is the layer's name in the adapter's own form.
    """

    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor | None
    module: str


def find_adapter(named: str, bases: list[Path]) -> Path:
    """Find the adapter's weight file, from the name of a file or of a folder.

    Raises:
        ValueError: if nothing is there.
    """
    for base in bases:
        path = base / named
        if path.is_file():
            return path
        found = next((path / name for name in ADAPTER_FILES if (path / name).is_file()), None)
        if found:
            return found
    raise ValueError(
        f"checkpointer.adapter_checkpoint {named} was not found in {', '.join(map(str, bases))}; it is a "
        "file, or a folder "
        f"with one of {', '.join(ADAPTER_FILES)}"
    )


def merge_adapter(
    weights: LazyStateDict,
    path: Path,
    *,
    model_type: str,
    hf_config: HFConfig | None,
    alpha: float | None,
    allow_unsafe_pickle: bool,
    notes: list[str],
) -> None:
    """Have every weight that the adapter changes merged when it is read.

    Args:
        weights: of the base model; changed in place.
        path: the adapter's weight file; ``adapter_config.json`` is read beside it.
        model_type: torchtune's, and
        hf_config: the base model's config.json, for the names and rows of an adapter in PEFT's form.
        alpha: the training's lora_alpha, for an adapter without adapter_config.json.
        allow_unsafe_pickle: see ``read_torch_file``.
        notes: what the person should know is appended here.

    Raises:
        ValueError: if the adapter does not fit the model, changes more than linear layers, lacks its alpha,
            or is part of the weights already.
    """
    if path.suffix == ".safetensors":
        stored = read_safetensors(path)
    else:
        stored = index_torch_file(path, allow_unsafe_pickle=allow_unsafe_pickle, notes=notes)
    scaling = read_scaling(path.parent / "adapter_config.json")
    is_peft = any(name.startswith(PEFT_PREFIX) for name in stored)
    pairs = _peft_pairs(stored, model_type, hf_config) if is_peft else _tune_pairs(stored)
    _check_fit(weights, pairs, path)
    if scaling.dora and any(pair.magnitude is None for pair in pairs.values()):
        raise ValueError(f"adapter_config.json says use_dora, but {path} lacks the magnitudes of some layers")
    if not is_peft and (scaling.alphas or scaling.ranks):
        raise ValueError(
            "adapter_config.json has alpha_pattern or rank_pattern, which name Hugging Face's modules, and"
            f" {path} has torchtune's names: use PEFT's adapter_model.safetensors"
        )
    scaled = {name: _rank_and_alpha(scaling, pair, alpha) for name, pair in pairs.items()}
    _refuse_second_merge(weights, pairs, scaled, path)
    for name, pair in pairs.items():
        weights.add(
            name, weights.meta[name], partial(_merged, weights.reader(name), name, pair, *scaled[name])
        )
    ranks = sorted({pair.a.shape[0] for pair in pairs.values()})
    alphas = sorted({alpha for _, alpha in scaled.values()})
    dora = ", DoRA" if any(pair.magnitude is not None for pair in pairs.values()) else ""
    notes.append(
        f"adapter {path.name} merged into {len(pairs)} weights: rank {', '.join(map(str, ranks))}, "
        f"alpha {', '.join(f'{a:g}' for a in alphas)}{dora}"
    )


def _tune_pairs(stored: Mapping[str, StoredTensor]) -> dict[str, Pair]:
    modules = {name.removesuffix(".lora_a.weight") for name in stored if name.endswith(".lora_a.weight")}
    known = {f"{m}.{end}" for m in modules for end in ("lora_a.weight", "lora_b.weight", "magnitude")}
    _refuse_rest([name for name in stored if name not in known])
    pairs = {}
    for module in sorted(modules):
        magnitude = stored.get(f"{module}.magnitude")
        a, b = (_read(stored, f"{module}.{end}.weight") for end in ("lora_a", "lora_b"))
        pairs[f"{module}.weight"] = Pair(a, b, magnitude.read() if magnitude else None, module)
    return pairs


def _peft_pairs(
    stored: Mapping[str, StoredTensor], model_type: str, hf_config: HFConfig | None
) -> dict[str, Pair]:
    """Put PEFT's factors in torchtune's order: B has the rows of the weight, so the weight's converter does
    it.
    """
    names = [name.removesuffix(".lora_A.weight") for name in stored if name.endswith(".lora_A.weight")]
    known = {f"{name}.{end}.weight" for name in names for end in ("lora_A", "lora_B")}
    rest = [name for name in stored if name not in known]
    if any("lora_magnitude_vector" in name for name in rest):
        raise ValueError(
            "the adapter is a DoRA in PEFT's form: torchtune writes the magnitudes of q and k in another"
            " order than PEFT, and the file does not tell which; use torchtune's adapter_model.pt, or merge"
            " it first"
        )
    _refuse_rest(rest)
    family = family_of_model_type(model_type)
    converter, layout = family.converter, head_layout(hf_config, family.architecture.defaults)
    pairs = {}
    for name in names:
        a, b = (_read(stored, f"{name}.{end}.weight") for end in ("lora_A", "lora_B"))
        # B has the rows of the whole weight, but only `rank` columns.
        of_b = replace(layout, columns=b.shape[1])
        for target, part in converter({f"{name.removeprefix(PEFT_PREFIX)}.weight": b}, of_b).items():
            pairs[target] = Pair(a, part, None, name.removeprefix(PEFT_PREFIX))
    return pairs


def _read(stored: Mapping[str, StoredTensor], name: str) -> torch.Tensor:
    if name not in stored:
        raise ValueError(f"the adapter lacks {name}, the other half of a layer's update")
    return stored[name].read()


def _refuse_rest(names: list[str]) -> None:
    if names:
        lines = name_some("not an update of a linear layer", names)
        raise ValueError("the adapter changes more than linear layers; merge it first:\n" + "\n".join(lines))


def _check_fit(weights: LazyStateDict, pairs: Mapping[str, Pair], path: Path) -> None:
    if not pairs:
        raise ValueError(f"{path} holds no LoRA factors")
    absent = [name for name in pairs if name not in weights]
    wrong = [
        f"{name} (adapter [{pair.b.shape[0]}, {pair.a.shape[1]}], model {list(weights.meta[name].shape)})"
        for name, pair in pairs.items()
        if name in weights and (pair.b.shape[0], pair.a.shape[1]) != tuple(weights.meta[name].shape)
    ]
    if absent or wrong:
        lines = name_some("not in the model", absent) + name_some("wrongly shaped", wrong)
        if "output.weight" in absent and "tok_embeddings.weight" in weights:
            lines.append(
                "  hint: the adapter updates lm_head, and the checkpoint's head is its embedding: PEFT"
                " updates the head alone, so save the merged model with tie_word_embeddings=False and"
                " score that"
            )
        raise ValueError(f"the adapter {path} does not fit the checkpoint:\n" + "\n".join(lines))


def _rank_and_alpha(scaling: Scaling, pair: Pair, alpha: float | None) -> tuple[float, float]:
    """Return (rank, alpha) such that the update is alpha / rank * B A; rsLoRA divides by the root of the
    rank.
    """
    rank, found = scaling.of_module(pair.module, pair.a.shape[0])
    found = alpha if found is None else found
    if found is None:
        raise ValueError(
            "the adapter has no adapter_config.json beside it, so its scale is unknown: set"
            " checkpointer.lora_alpha to the lora_alpha of the training's model section"
        )
    if alpha is not None and float(found) != float(alpha):
        raise ValueError(
            f"checkpointer.lora_alpha is {alpha}, adapter_config.json says {found}: remove the former"
        )
    return rank, float(found)


def _merged(read: Any, name: str, pair: Pair, rank: float, alpha: float) -> torch.Tensor:
    module = name.removesuffix(".weight")
    # Cloned, because torchtune adds in place and the tensor may be a mapped file.
    parts = {name: read().clone(), f"{module}.lora_a.weight": pair.a, f"{module}.lora_b.weight": pair.b}
    if pair.magnitude is not None:
        parts[f"{module}.magnitude"] = pair.magnitude
    return get_merged_lora_ckpt(parts, rank=rank, alpha=alpha)[name]


def refuse_same_epoch(path: Path, folder: Path) -> None:
    """Refuse an adapter beside the weights of a torchtune epoch, into which torchtune merged it.

    Raises:
        ValueError: if the adapter is in the weights' folder, and that is an epoch's.
    """
    if path.parent.resolve() == folder.resolve() and folder.resolve().name.startswith("epoch_"):
        raise ValueError(
            f"the checkpoint already contains the adapter {path}: torchtune merged it into the weights that"
            " it wrote to the same epoch folder. Drop checkpointer.adapter_checkpoint, or point"
            " checkpoint_dir to the base model"
        )


def _refuse_second_merge(
    weights: LazyStateDict, pairs: Mapping[str, Pair], scaled: Mapping[str, tuple[float, float]], path: Path
) -> None:
    """Refuse an adapter that the weights contain already, wherever the two came from.

    Raises:
        ValueError: if every probed layer that allows a verdict contains it.
    """
    names = [name for name, pair in pairs.items() if pair.magnitude is None]
    probed = names[:: max(1, len(names) // PROBED_LAYERS)]
    shares = [merged_share(weights[name], pairs[name], *scaled[name]) for name in probed]
    clear = [share for share in shares if share is not None]
    if clear and all(abs(share - 1) < MERGED_TOLERANCE for share in clear):
        raise ValueError(
            f"the checkpoint already contains the adapter {path}: in {len(clear)} of {len(clear)} probed"
            f" layers the weights hold {sum(clear) / len(clear):.2f} times its update. Drop"
            " checkpointer.adapter_checkpoint, or point checkpoint_dir to the base model"
        )


def merged_share(weight: torch.Tensor, pair: Pair, rank: float, alpha: float) -> float | None:
    """Compute how many times W contains the update D = alpha/rank B A: <W, D> / <D, D>, without forming D.

    A base weight is no multiple of an update learnt later: the share is near 0. Noise of the base weight of
    standard deviation s adds about s / |D|; where that is not small nothing can be said and None is
    returned.
    """
    a, b, w = pair.a.float(), pair.b.float(), weight.float()
    scale = alpha / rank
    d_squared = scale**2 * float(torch.sum((b.T @ b) * (a @ a.T)))
    if d_squared <= 0 or float(w.std()) > MERGED_TOLERANCE / 2 * math.sqrt(d_squared):
        return None
    return scale * float(torch.sum((b.T @ w) * a)) / d_squared
