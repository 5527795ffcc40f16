"""Models of the transformers library by their own code: the second engine.

    model:
      _component_: ppl_eval.models.hf.causal_lm
      path: ${checkpointer.checkpoint_dir}
    checkpointer:
      _component_: torchtune.training.FullModelHFCheckpointer
      checkpoint_dir: /models/Qwen3-8B
      model_type: TRANSFORMERS

transformers is imported when such a model is built, and in no other run.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ppl_eval.config.files import read_json_object
from ppl_eval.models.hf_decoder import HFDecoder


def causal_lm(path: str, attention: str = "sdpa") -> HFDecoder:
    """Build the model that a folder's config.json describes, on the current device and in the default dtype.

    Args:
        path: a folder with config.json, as ``save_pretrained`` writes it.
        attention: transformers' attention implementation: ``sdpa``, ``eager``, or another that is installed.

    Raises:
        ValueError: if there is no such folder, transformers is missing or does not know the model, or the
            model is no causal language model, comes with code of its own, or lacks that attention.
    """
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"model.path is {path}, which holds no config.json; name a folder of a local checkpoint"
        )
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise ValueError(
            "ppl_eval.models.hf needs transformers: pip install 'distributed_ppl_eval[hf]'"
        ) from error
    logging.set_verbosity_error()
    config = _config_of(AutoConfig, folder)
    try:
        module = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.get_default_dtype(),
            attn_implementation=attention,
            trust_remote_code=False,
        )
    except (ValueError, ImportError, KeyError, AttributeError) as error:
        raise ValueError(
            f"transformers cannot build the causal language model of {folder / 'config.json'} with"
            f" model.attention={attention}: {error}"
        ) from error
    _keep_in_float32(module)
    return HFDecoder(module, read_json_object(folder / "config.json"))


def _keep_in_float32(module: Any) -> None:
    """Give weights that transformers keeps in float32 beside others in half precision that dtype.

    Raises:
        ValueError: if embedding or head are among them.
    """
    plan = module._get_dtype_plan(torch.get_default_dtype())
    # The table's patterns are regular expressions in which a star stands for any text.
    kept = [re.compile(pattern.replace("*", ".*")) for pattern in plan]
    ends = {id(module.get_input_embeddings().weight), id(module.get_output_embeddings().weight)}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not any(pattern.search(name) for pattern in kept) or tensor.dtype == torch.float32:
            continue
        if id(tensor) in ends:
            raise ValueError(
                f"transformers keeps {name} of a {type(module).__name__} in float32, which is not supported;"
                " use dtype=fp32"
            )
        place, _, last = name.rpartition(".")
        cast = tensor.detach().float()
        whole = nn.Parameter(cast, requires_grad=False) if isinstance(tensor, nn.Parameter) else cast
        setattr(module.get_submodule(place), last, whole)


def _config_of(auto: Any, folder: Path) -> Any:
    try:
        config = auto.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(
            f"transformers does not know the model of {folder / 'config.json'}: {error}. Models that come"
            " with code of their own are not run: take one whose code is part of transformers, or"
            " install a newer release of transformers"
        ) from error
    # Packed weights are dequantised while they are read (``checkpoints.packed_weights``).
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config
