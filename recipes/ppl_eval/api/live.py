"""What a live model and tokenizer are in a config: sections that stand for them."""

import hashlib
import json
import secrets
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from ppl_eval.config import paths
from ppl_eval.config.files import whole_folder
from ppl_eval.config.settings import KEYS, Settings
from ppl_eval.models import live
from ppl_eval.scoring.live import is_compiled, is_sharded

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
_HOME = "${oc.env:PPL_EVAL_HOME,${oc.env:HOME}/.cache/ppl_eval}"
# What decides how a model is built, loaded or divided: this one is.
_MODEL_KEYS = (
    *("quantizer", "tensor_parallel_dim", "tensor_parallel_plan", "context_parallel_dim"),
    *("data_parallel_replicate_dim", "fsdp_cpu_offload"),
)


def put_model(config: DictConfig, decoder: nn.Module) -> None:
    """Let a config's sections stand for a decoder in memory; what it was built from goes."""
    parameter = next(decoder.parameters())
    config.model = {"_component_": live.COMPONENT}
    # Required, and never opened.
    config.checkpointer = {"_component_": "torchtune.training.FullModelTorchTuneCheckpointer"}
    config.dtype = _DTYPES.get(parameter.dtype, str(parameter.dtype))
    config.device = parameter.device.type
    config.compile = is_compiled(decoder)
    config.data_parallel_shard_dim = -1 if is_sharded(decoder) else 1
    # Its weights are other ones tomorrow, under the same names.
    config.resume = "never"


def check_untouched(settings: Settings, before: Mapping[str, Any]) -> None:
    """Refuse overrides, and keys of the config, that a model in memory cannot follow.

    Raises:
        ValueError: names them.
    """
    same = ("model", "checkpointer", "dtype", "device", "compile", "data_parallel_shard_dim", "resume")
    wrong = [name for name in same if settings.written[name] != before[name]]
    wrong += [name for name in _MODEL_KEYS if getattr(settings, name) != KEYS[name].default]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)}: a model in memory is what it is, where it is; leave these keys out"
        )


def put_tokenizer(config: DictConfig, tokenizer: Any) -> None:
    """Let a config's section stand for a tokenizer in memory: it is written to the cache, by its content.

    Args:
        config: the config.
        tokenizer: torchtune's ``HuggingFaceBaseTokenizer``, or a fast tokenizer of transformers.

    Raises:
        ValueError: for any other, which a config can name.
    """
    inner, about = getattr(tokenizer, "tokenizer", None), getattr(tokenizer, "config", None)
    if hasattr(tokenizer, "backend_tokenizer"):
        inner = tokenizer.backend_tokenizer
        about = {
            **{f"{name}_token": getattr(tokenizer, f"{name}_token") for name in ("bos", "eos")},
            **{name: getattr(tokenizer, name, None) for name in ("add_bos_token", "add_eos_token")},
        }
    if inner is None or not hasattr(inner, "to_str") or not isinstance(about, Mapping):
        raise ValueError(
            f"the tokenizer is a {type(tokenizer).__name__}; a HuggingFaceBaseTokenizer or a fast tokenizer"
            " of transformers can be given, any other by the config's section tokenizer"
        )
    files = {"tokenizer.json": inner.to_str(), "tokenizer_config.json": json.dumps(dict(about), default=str)}
    name = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:32]
    folder = paths.home() / "tokenizers" / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Several processes may write it: each under a name of its own, and whoever is last changes nothing.
        own = folder.with_name(f"{name}.{secrets.token_hex(8)}")
        with whole_folder(own) as half:
            for file, content in files.items():
                (half / file).write_text(content, encoding="utf-8")
        try:
            own.rename(folder)
        except OSError:
            shutil.rmtree(own, ignore_errors=True)
    config.tokenizer = {
        "_component_": "torchtune.modules.transforms.tokenizers.HuggingFaceBaseTokenizer",
        "tokenizer_json_path": f"{_HOME}/tokenizers/{name}/tokenizer.json",
        "tokenizer_config_json_path": f"{_HOME}/tokenizers/{name}/tokenizer_config.json",
    }
