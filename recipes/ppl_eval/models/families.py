"""The model families that can be scored: what torchtune calls them, what transformers calls them, and what
must be mended.

A new family is one entry in `FAMILIES`, with its corrections, if it needs any, in `family_corrections`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchtune.modules import TransformerDecoder

from ppl_eval.models import corrections as fix

HFConfig = Mapping[str, Any]
Correction = Callable[[TransformerDecoder, str, HFConfig | None], list[str]]


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: Name of the torchtune package of its builders and of its folder under configs/.
        component: Dotted path of the builder that takes every constant as an argument.
        model_type: The checkpointer's `model_type` (torchtune's `ModelType`).
        hf_model_type: `model_type` in config.json.
        converter: Dotted path of torchtune's function from Hugging Face's names and layouts to its own.
        hf_adds_bos: Whether the published Hugging Face tokenizer prepends BOS to a text by itself.
        corrections: What is mended in the built model, in this order.
    """

    name: str
    component: str
    model_type: str
    hf_model_type: str
    converter: str
    hf_adds_bos: bool
    corrections: tuple[Correction, ...] = ()

    @property
    def package(self) -> str:
        """The torchtune package that holds the builders."""
        return f"torchtune.models.{self.name}"


_LLAMA_CONVERTER = "torchtune.models.convert_weights.hf_to_tune"
_PHI_CONVERTER = "torchtune.models.phi3._convert_weights.phi3_hf_to_tune"
_QWEN_CONVERTER = "torchtune.models.qwen2._convert_weights.qwen2_hf_to_tune"
_GEMMA2_CONVERTER = "torchtune.models.gemma2._convert_weights.gemma2_hf_to_tune"
_LLAMA2 = "torchtune.models.llama2.llama2"
_LLAMA3_1 = "torchtune.models.llama3_1.llama3_1"
_PHI3 = "torchtune.models.phi3.phi3"
_QWEN2 = "torchtune.models.qwen2.qwen2"
_GEMMA2_FIXES = (fix.gemma2_builder_caps, fix.gemma2_final_softcap, fix.gemma2_layers)
_PHI_FIXES = (fix.phi4_rope_base, fix.phi3_rotary, fix.sliding_windows)

FAMILIES: tuple[Family, ...] = (
    Family("llama2", _LLAMA2, "LLAMA2", "llama", _LLAMA_CONVERTER, True),
    Family("code_llama2", _LLAMA2, "LLAMA2", "llama", _LLAMA_CONVERTER, True),
    Family("llama3", "torchtune.models.llama3.llama3", "LLAMA3", "llama", _LLAMA_CONVERTER, True),
    Family("llama3_1", _LLAMA3_1, "LLAMA3", "llama", _LLAMA_CONVERTER, True),
    # SmolLM2 is built by this family's component too (scale_factor 1); its tokenizer adds no BOS.
    Family("llama3_2", "torchtune.models.llama3_2.llama3_2", "LLAMA3_2", "llama", _LLAMA_CONVERTER, True),
    Family("llama3_3", _LLAMA3_1, "LLAMA3", "llama", _LLAMA_CONVERTER, True),
    Family(
        *("mistral", "torchtune.models.mistral.mistral", "MISTRAL", "mistral", _LLAMA_CONVERTER, True),
        corrections=(fix.sliding_windows,),
    ),
    Family("gemma", "torchtune.models.gemma.gemma", "GEMMA", "gemma", _LLAMA_CONVERTER, True),
    Family(
        *("gemma2", "torchtune.models.gemma2.gemma2", "GEMMA2", "gemma2", _GEMMA2_CONVERTER, True),
        corrections=_GEMMA2_FIXES,
    ),
    Family("phi3", _PHI3, "PHI3_MINI", "phi3", _PHI_CONVERTER, False, _PHI_FIXES),
    Family("phi4", _PHI3, "PHI4", "phi3", _PHI_CONVERTER, False, _PHI_FIXES),
    Family("qwen2", _QWEN2, "QWEN2", "qwen2", _QWEN_CONVERTER, False, (fix.sliding_windows,)),
    Family("qwen2_5", _QWEN2, "QWEN2", "qwen2", _QWEN_CONVERTER, False, (fix.sliding_windows,)),
)


def supported() -> str:
    """One sentence on what can be scored."""
    names = ", ".join(family.name for family in FAMILIES)
    types = ", ".join(sorted({family.hf_model_type for family in FAMILIES}))
    return (
        f"supported are torchtune 0.6.1's text families ({names}), for checkpoints whose config.json says "
        f"model_type {types}"
    )


def family_of(builder: str) -> Family:
    """The family of a builder, by its dotted path.

    Raises:
        ValueError: If no family has it.
    """
    for family in FAMILIES:
        if builder.startswith(f"{family.package}."):
            return family
    raise ValueError(f"model._component_={builder} is of no family that can be scored; {supported()}")


def check_architecture(config: HFConfig) -> None:
    """Refuses checkpoints that no builder of torchtune 0.6.1 computes.

    Raises:
        ValueError: For an unknown model_type, a head other than a language model's, or weights packed by
            another quantiser.
    """
    model_type = config.get("model_type")
    if model_type not in {family.hf_model_type for family in FAMILIES}:
        raise ValueError(
            f"the checkpoint's config.json has model_type {model_type!r}, which torchtune 0.6.1 cannot "
            f"build; {supported()}"
        )
    for architecture in config.get("architectures") or ():
        if not architecture.endswith("ForCausalLM"):
            raise ValueError(
                f"the checkpoint is a {architecture}, which gives no probability of a next token; "
                "only ...ForCausalLM can be scored"
            )
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "an unnamed method")
        raise ValueError(
            f"the weights are already quantised by {method} (quantization_config in config.json), "
            "a form that torchtune cannot load; take the full-precision checkpoint and set `quantizer`"
        )


def correct(model: TransformerDecoder, builder: str, hf_config: HFConfig | None) -> list[str]:
    """Mends, in place, what torchtune computes differently from transformers.

    Call it once after building, before weights are loaded, sharded, quantised or compiled; parameter names do
    not change. The scorer must apply `model.final_logit_softcap` (nats-free number or None) to the logits.
    Every layer gets `attn.sliding_window` (tokens or None).

    Args:
        model: What the builder returned, on any device, meta included.
        builder: The builder's dotted path, `model._component_` of the config.
        hf_config: The checkpoint's config.json, or None if it has none.

    Returns:
        One line per correction, for the result.

    Raises:
        ValueError: If the family or the architecture is not supported.
    """
    family = family_of(builder)
    if hf_config is not None:
        check_architecture(hf_config)
    if not hasattr(model, "final_logit_softcap"):
        model.final_logit_softcap = None
    notes = [note for correction in family.corrections for note in correction(model, builder, hf_config)]
    for layer in model.layers:
        if not hasattr(layer.attn, "sliding_window"):
            layer.attn.sliding_window = None
    return notes
