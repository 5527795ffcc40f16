"""Tiny random models of every family, written by transformers and scored by both sides."""

import functools
import inspect
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.overrides import TorchFunctionMode
from torchtune.config._utils import _get_component_from_path

from helpers.models import write_random
from ppl_eval.checkpoints.lazy_state_dict import load_into
from ppl_eval.checkpoints.load import load_state_dict
from ppl_eval.models.config_check import model_arguments
from ppl_eval.models.families import correct, family_of
from ppl_eval.scoring.nll import ScoringModel

WINDOW = 16
SHORT, LONG = 11, 81  # inputs; below and well above WINDOW

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.0],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
}

_FOLDER = tempfile.TemporaryDirectory(prefix="family_models")


# The builder of each family that takes every constant as an argument.
BUILDERS = {
    family: f"torchtune.models.{builder}"
    for family, builder in {
        "llama2": "llama2.llama2",
        "code_llama2": "llama2.llama2",
        "llama3": "llama3.llama3",
        "llama3_1": "llama3_1.llama3_1",
        "llama3_2": "llama3_2.llama3_2",
        "llama3_3": "llama3_1.llama3_1",
        "mistral": "mistral.mistral",
        "gemma": "gemma.gemma",
        "gemma2": "gemma2.gemma2",
        "phi3": "phi3.phi3",
        "phi4": "phi3.phi3",
        "qwen2": "qwen2.qwen2",
        "qwen2_5": "qwen2.qwen2",
    }.items()
} | {
    family: f"ppl_eval.models.{family}.{family}"
    for family in ("mistral_nemo", "phi4_mini", "qwen3", "olmo2", "granite3", "gemma3", "smollm3")
}


@dataclass(frozen=True)
class Case:
    """A tiny model: its family, transformers' config class and what differs from SIZES."""

    name: str
    family: str
    config_class: str
    settings: dict[str, Any]


CASES = [
    Case("llama2", "llama2", "LlamaConfig", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    Case("code_llama2", "code_llama2", "LlamaConfig", {"rope_theta": 1e6, "rms_norm_eps": 1e-5}),
    Case("llama3", "llama3", "LlamaConfig", {"rope_theta": 5e5, "rms_norm_eps": 1e-5}),
    Case("llama3_1", "llama3_1", "LlamaConfig", {"rope_parameters": LLAMA3_ROPE | {"factor": 8.0}}),
    Case(
        *("llama3_2", "llama3_2", "LlamaConfig"),
        {"rope_parameters": LLAMA3_ROPE | {"factor": 32.0}, "tie_word_embeddings": True},
    ),
    Case("llama3_2_untied", "llama3_2", "LlamaConfig", {"rope_parameters": LLAMA3_ROPE | {"factor": 32.0}}),
    Case("llama3_3", "llama3_3", "LlamaConfig", {"rope_parameters": LLAMA3_ROPE | {"factor": 8.0}}),
    Case("smollm2", "llama3_2", "LlamaConfig", {"rope_theta": 1e5, "tie_word_embeddings": True}),
    Case("mistral", "mistral", "MistralConfig", {"sliding_window": WINDOW, "rms_norm_eps": 1e-5}),
    Case("mistral_v3", "mistral", "MistralConfig", {"sliding_window": None, "rope_theta": 1e6}),
    Case("gemma", "gemma", "GemmaConfig", {"head_dim": 32, "num_key_value_heads": 1}),
    Case(
        *("gemma2", "gemma2", "Gemma2Config"),
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            # Far below the published 50 and 30: the logits of so small a model would hardly reach those.
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 7.0,
        },
    ),
    Case("phi3", "phi3", "Phi3Config", {"num_key_value_heads": 4, "sliding_window": WINDOW}),
    Case(
        *("phi3_longrope", "phi3", "Phi3Config"),
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    ),
    Case(
        *("phi3_partial", "phi3", "Phi3Config"),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    Case("phi4", "phi4", "Phi3Config", {"rope_theta": 250_000.0, "sliding_window": None}),
    Case("qwen2", "qwen2", "Qwen2Config", {"rope_theta": 1e6, "tie_word_embeddings": True}),
    Case(
        *("qwen2_window", "qwen2", "Qwen2Config"),
        {"rope_theta": 1e6, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    Case("qwen2_5", "qwen2_5", "Qwen2Config", {"rope_theta": 1e6, "rms_norm_eps": 1e-5}),
    Case(
        *("mistral_nemo", "mistral_nemo", "MistralConfig"),
        {"head_dim": 32, "sliding_window": None, "rope_theta": 1e6},
    ),
    Case(
        *("phi4_mini", "phi4_mini", "Phi3Config"),
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 32,
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
    ),
    Case("qwen3", "qwen3", "Qwen3Config", {"rope_theta": 1e6, "head_dim": 32}),
    Case(
        *("qwen3_tied", "qwen3", "Qwen3Config"),
        {"rope_theta": 1e6, "head_dim": 16, "tie_word_embeddings": True},
    ),
    Case("olmo2", "olmo2", "Olmo2Config", {"rope_theta": 5e5, "rms_norm_eps": 1e-6}),
    Case(
        *("granite3", "granite3", "GraniteConfig"),
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.125,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    Case(
        *("gemma3", "gemma3", "Gemma3TextConfig"),
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
        },
    ),
    Case(
        *("gemma3_scaled", "gemma3", "Gemma3TextConfig"),
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    Case("smollm3", "smollm3", "SmolLM3Config", {"no_rope_layer_interval": 3, "rope_theta": 5e6}),
]


class Float64(TorchFunctionMode):
    """Lets code that asks for float32 have float64, so that both sides compute the same formulas in float64.

    Both libraries ask for float32 by name in places (norms, RoPE tables, softmax), whatever the model's
    dtype. In this mode every such request, `.float()` or `dtype=torch.float32`, is met with float64, and
    nothing else changes. With `strict`, a tensor that is float32 all the same raises: no rounding to float32
    hides.
    """

    def __init__(self, strict: bool = False) -> None:
        super().__init__()
        self.strict = strict

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if arg is torch.float32 else arg for arg in args]
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        result = func(*args, **kwargs)
        if self.strict and isinstance(result, torch.Tensor):
            assert result.dtype is not torch.float32, f"{func} gave float32"
        return result


@contextmanager
def precision(dtype: torch.dtype, strict: bool = False):
    """float32: nothing changes. float64: everything that would be float32 becomes float64."""
    if dtype is torch.float32:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with Float64(strict):
            yield
    finally:
        torch.set_default_dtype(before)


@functools.cache
def checkpoint(name: str) -> Path:
    """A folder with a case's config.json and random weights, written by transformers, once a process."""
    case = next(case for case in CASES if case.name == name)
    folder = Path(_FOLDER.name, case.name)
    config = getattr(transformers, case.config_class)(**SIZES | case.settings)
    write_random(config, folder, seed=20)
    return folder


def random_tokens(num_inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows of inputs and their targets."""
    random = torch.Generator().manual_seed(21)
    tokens_BT = torch.randint(3, SIZES["vocab_size"], (2, num_inputs + 1), generator=random)
    return tokens_BT[:, :-1], tokens_BT[:, 1:]


@functools.cache
def transformers_nll(folder: Path, num_inputs: int, dtype: torch.dtype) -> np.ndarray:
    """NLL of every target by transformers' eager model, row-major."""
    tokens_BT, labels_BT = random_tokens(num_inputs)
    with precision(dtype):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        )
    with precision(dtype, strict=True), torch.no_grad():
        log_probs = torch.log_softmax(model.eval()(tokens_BT).logits, dim=-1)
        return -log_probs.gather(-1, labels_BT[..., None]).flatten().numpy()


def arguments_for(config: dict[str, Any], component: str) -> dict[str, Any]:
    """The arguments of a component builder that config.json implies."""
    wanted = inspect.signature(_get_component_from_path(component)).parameters
    return {key: value for key, value in model_arguments(config).items() if key in wanted}


def build(
    case: Case,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    mend: Callable[..., list[str]] = correct,
    **changed: Any,
) -> tuple[torch.nn.Module, dict[str, Any], list[str]]:
    """The family's torchtune model with a checkpoint's weights, its config.json and corrections' notes."""
    package = BUILDERS[case.family].split(".models.")[0] + f".models.{case.family}"
    loaded = load_state_dict(
        {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(folder),
            "model_type": family_of(f"{package}.").model_type,
        }
    )
    config = loaded.hf_config
    with precision(dtype):
        builder = _get_component_from_path(BUILDERS[case.family])
        with torch.device("meta"):
            model = builder(**arguments_for(config, BUILDERS[case.family]) | changed)
        notes = mend(model, f"{package}.{case.family}", config)
        load_into(model, loaded.state_dict, dtype=dtype)
    return model.eval(), config, notes


def torchtune_nll(model: torch.nn.Module, num_inputs: int, dtype: torch.dtype) -> np.ndarray:
    """NLL of every target by the recipe's scorer, row-major."""
    with precision(dtype, strict=True), torch.no_grad():
        nll_N, _ = ScoringModel(model, max_logits_bytes=2**20)(*random_tokens(num_inputs))
    return nll_N.numpy()
