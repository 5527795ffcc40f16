"""The names that each form gives its weights, turned into torchtune's by torchtune's own converters.

Every converter works key by key, so each key is converted when its tensor is read; running the converter on
a tensor of the meta device first gives the new names and shapes without reading anything.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torchtune.models import convert_weights

from ppl_eval.checkpoints.lazy_state_dict import LazyStateDict
from ppl_eval.checkpoints.quantized_tensors import is_quantized
from ppl_eval.checkpoints.safetensors import StoredTensor, read_safetensors
from ppl_eval.checkpoints.torch_files import index_torch_file
from ppl_eval.models.converters import HFConverter, head_layout
from ppl_eval.models.families import FAMILIES, OWN_NAMES, family_of_model_type
from ppl_eval.models.hf_config import HFConfig

# torchtune's checkpointer class -> form of the files
FORMS = {
    "FullModelHFCheckpointer": "hf",
    "FullModelMetaCheckpointer": "meta",
    "FullModelTorchTuneCheckpointer": "torchtune",
}
# By which names the forms are told apart.
_NAMES = {
    "hf": re.compile(r"model\.(layers\.\d+|embed_tokens)\."),
    "meta": re.compile(r"layers\.\d+\.(attention|feed_forward|attention_norm|ffn_norm)\."),
    "torchtune": re.compile(r"layers\.\d+\.(attn|mlp|sa_norm|mlp_norm|sa_scale)\."),
}

Stored = dict[str, StoredTensor]
Converter = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def index_files(paths: list[Path], *, form: str, allow_unsafe_pickle: bool, notes: list[str]) -> Stored:
    """Index all tensors of all files by the files' own names.

    Raises:
        ValueError: if a file is truncated, corrupt or no checkpoint, or two files hold the same name.
    """
    if form == "meta" and len(paths) > 1:
        raise ValueError(
            f"{len(paths)} files of Meta's form are slices of one model (model parallelism), which "
            f"torchtune cannot join: "
            "use the model's Hugging Face form"
        )
    merged: Stored = {}
    for path in paths:
        if path.suffix == ".safetensors":
            stored = read_safetensors(path)
        else:
            stored = index_torch_file(path, allow_unsafe_pickle=allow_unsafe_pickle, notes=notes)
        twice = sorted(set(stored) & set(merged))
        if twice:
            raise ValueError(
                f"{path} repeats {len(twice)} tensors of the files before it, first {twice[0]}: a file too "
                f"many?"
            )
        merged.update(stored)
    return merged


def convert(stored: Stored, *, form: str, model_type: str, hf_config: HFConfig | None) -> LazyStateDict:
    """Put the stored tensors under torchtune's names, converted when they are read.

    A name that the converter does not know is kept as it is: the comparison with the model then reports it
    together with everything else that does not fit.

    Raises:
        ValueError: for an unknown model type, no config.json for the HF form, or shapes that contradict
            config.json.
    """
    _check_form(stored, form)
    converter = _converter_of(form, model_type, hf_config)
    lazy = LazyStateDict()
    contradictions = []
    for name, tensor in stored.items():
        if is_quantized(tensor.meta):  # in memory already, and only torchtune's own form holds such
            lazy.add(name, tensor.meta, tensor.read)
            continue
        try:
            targets = converter({name: tensor.meta})
        except RuntimeError:
            contradictions.append(f"{name} {list(tensor.meta.shape)}")
            continue
        except Exception as e:  # torchtune raises a bare Exception for a name it does not know
            if "unexpected key" not in str(e):
                raise
            lazy.add(name, tensor.meta, tensor.read)
            continue
        for target, target_meta in targets.items():
            lazy.add(target, target_meta, partial(_converted, tensor.read, converter, name, target))
    if contradictions:
        raise ValueError(
            f"{len(contradictions)} tensors have shapes that config.json's num_attention_heads, "
            f"num_key_value_heads, hidden_size "
            f"and head_dim contradict: {', '.join(contradictions[:10])}"
        )
    return lazy


def _check_form(stored: Stored, form: str) -> None:
    """Refuse weights whose names are all of another checkpointer's form."""
    found = {of for of, pattern in _NAMES.items() if any(map(pattern.match, stored))}
    if not found or form in found:
        return
    components = {own: f"torchtune.training.{component}" for component, own in FORMS.items()}
    example = next(name for name in stored if any(pattern.match(name) for pattern in _NAMES.values()))
    raise ValueError(
        f"the weights have the names of {' or '.join(components[of] for of in sorted(found))} ({example}), "
        f"but checkpointer._component_ is {components[form]}; set it to "
        f"{' or '.join(components[of] for of in sorted(found))}"
    )


def _converted(
    read: Callable[[], torch.Tensor], converter: Converter, name: str, target: str
) -> torch.Tensor:
    return converter({name: read()})[target]


def _converter_of(form: str, model_type: str, hf_config: HFConfig | None) -> Converter:
    if model_type == OWN_NAMES:
        if form != "hf":
            raise ValueError(
                f"checkpointer.model_type is {OWN_NAMES}, which reads checkpoints in Hugging Face's form; use"
                " checkpointer._component_=torchtune.training.FullModelHFCheckpointer"
            )
        return dict
    family = family_of_model_type(model_type)
    if form == "torchtune":
        return dict
    if form == "meta":
        # Of a tied model Meta's file repeats the embedding; the comparison with the model sees to that.
        return convert_weights.meta_to_tune
    _check_model_type(model_type, family.converter, hf_config)
    return partial(family.converter, layout=head_layout(hf_config, family.architecture.defaults))


def _check_model_type(model_type: str, converter: HFConverter, hf_config: HFConfig | None) -> None:
    """Refuse a ``model_type`` whose converter is not the one of the model that config.json names.

    Raises:
        ValueError: with the types that fit.
    """
    named = (hf_config or {}).get("model_type")
    fitting = [family for family in FAMILIES if family.architecture.model_type == named]
    if fitting and all(family.converter is not converter for family in fitting):
        allowed = " or ".join(dict.fromkeys(family.model_type for family in fitting))
        raise ValueError(
            f"checkpointer.model_type is {model_type}, and the checkpoint is a {named} (model_type in"
            f" config.json), whose weights have other names or rows: set checkpointer.model_type={allowed}"
        )
