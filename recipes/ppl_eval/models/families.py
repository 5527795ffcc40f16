"""The model families that can be scored: one table, from which the rest of the project derives.

Adding a family takes

1. one entry in ``FAMILIES``: the package of its builders, the checkpointer's ``model_type``, the architecture
   that its config.json names, the converter of Hugging Face's weight names, and corrections (in
   ``corrections``) where the builder computes something else than transformers;
2. if no entry has its architecture yet, an ``Architecture``: the defaults and the facts in which its
   config.json is read differently from a Llama's;
3. a config in ``configs/<family>/``.

The builder may be torchtune's or our own, and so may the converter. Building, reading checkpoints, the check
against config.json, its remedies and the corrections follow from the entry. Only a constant of a kind that no
architecture has yet needs more: its key in ``hf_config.llama_facts``, and in ``model_facts`` how it is read
out of the built modules. Tokenizers are no part of a family: ``tokenization.encoders`` has a table of their
classes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torchtune.modules import TransformerDecoder

from ppl_eval.models import architectures as arch
from ppl_eval.models import converters
from ppl_eval.models import corrections as fix
from ppl_eval.models.architectures import Architecture, Facts
from ppl_eval.models.hf_config import HFConfig

# The checkpointer's model_type for ``ppl_eval.models.hf``: names stay as they are in the files.
OWN_NAMES = "TRANSFORMERS"
# (model, builder's dotted path, what config.json says or None without one) -> notes
Correction = Callable[[TransformerDecoder, str, Facts | None], list[str]]


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        builders: dotted path of the package that holds its builders.
        model_type: the checkpointer's ``model_type`` (torchtune's ``ModelType``); families that share one
            share the converter.
        architecture: what its config.json names.
        converter: turns Hugging Face's weight names and row order into the builder's.
        corrections: what is changed in the built model, in this order.
    """

    builders: str
    model_type: str
    architecture: Architecture
    converter: converters.HFConverter
    corrections: tuple[Correction, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of its package and of its folder under ``configs/``."""
        return self.builders.rpartition(".")[2]


_PHI_FIXES = (fix.phi4_rope_base, fix.phi3_rotary, fix.sliding_windows)
_GEMMA2_FIXES = (fix.gemma2_builder_caps, fix.gemma2_final_softcap, fix.gemma2_layers)

FAMILIES: tuple[Family, ...] = (
    Family("torchtune.models.llama2", "LLAMA2", arch.LLAMA, converters.llama),
    Family("torchtune.models.code_llama2", "LLAMA2", arch.LLAMA, converters.llama),
    Family("torchtune.models.llama3", "LLAMA3", arch.LLAMA, converters.llama),
    Family("torchtune.models.llama3_1", "LLAMA3", arch.LLAMA, converters.llama),
    Family("torchtune.models.llama3_2", "LLAMA3_2", arch.LLAMA, converters.llama),  # SmolLM2 too
    Family("torchtune.models.llama3_3", "LLAMA3", arch.LLAMA, converters.llama),
    Family("torchtune.models.mistral", "MISTRAL", arch.MISTRAL, converters.llama, (fix.sliding_windows,)),
    Family("torchtune.models.gemma", "GEMMA", arch.GEMMA, converters.llama),
    Family("torchtune.models.gemma2", "GEMMA2", arch.GEMMA2, converters.gemma2, _GEMMA2_FIXES),
    Family("torchtune.models.phi3", "PHI3_MINI", arch.PHI3, converters.phi3, _PHI_FIXES),
    Family("torchtune.models.phi4", "PHI4", arch.PHI3, converters.phi3, _PHI_FIXES),
    Family("torchtune.models.qwen2", "QWEN2", arch.QWEN2, converters.qwen2, (fix.sliding_windows,)),
    Family("torchtune.models.qwen2_5", "QWEN2", arch.QWEN2, converters.qwen2, (fix.sliding_windows,)),
    Family("ppl_eval.models.mistral_nemo", "MISTRAL", arch.MISTRAL, converters.llama, (fix.sliding_windows,)),
    Family("ppl_eval.models.phi4_mini", "PHI4", arch.PHI3, converters.phi3, _PHI_FIXES),
    Family("ppl_eval.models.qwen3", "QWEN3", arch.QWEN3, converters.qwen3, (fix.sliding_windows,)),
    Family("ppl_eval.models.olmo2", "OLMO2", arch.OLMO2, converters.norms_after),
    Family("ppl_eval.models.granite3", "GRANITE", arch.GRANITE, converters.llama),
    Family("ppl_eval.models.gemma3", "GEMMA3", arch.GEMMA3, converters.norms_after),
    Family("ppl_eval.models.smollm3", "SMOLLM3", arch.SMOLLM3, converters.llama, (fix.sliding_windows,)),
)


def supported() -> str:
    """Say in one sentence what can be scored."""
    names = ", ".join(family.name for family in FAMILIES)
    types = ", ".join(sorted({family.architecture.model_type for family in FAMILIES}))
    return (
        f"supported are these families ({names}), for checkpoints whose config.json says model_type {types}"
    )


def family_of(builder: str) -> Family:
    """Return the family of a builder, by its dotted path.

    Raises:
        ValueError: if no family has it.
    """
    package, _, name = builder.rpartition(".")
    for family in FAMILIES:
        if builder.startswith(f"{family.builders}."):
            if name.startswith(("lora_", "qlora_")):
                raise ValueError(
                    f"model._component_={builder} builds training's LoRA layers; set model._component_="
                    f"{package}.{name.partition('lora_')[2]} without the lora_* arguments, and"
                    " checkpointer.adapter_checkpoint to the adapter, which is merged while weights are read"
                )
            return family
    raise ValueError(f"model._component_={builder} is of no family that can be scored; {supported()}")


def family_of_model_type(model_type: str) -> Family:
    """Return a family of the checkpointer's ``model_type``; those that share one convert alike.

    Raises:
        ValueError: if no family has it.
    """
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    allowed = ", ".join(sorted({family.model_type for family in FAMILIES}))
    raise ValueError(f"checkpointer.model_type is {model_type!r}; text decoders are {allowed}")


def architecture_of(config: HFConfig) -> Architecture:
    """Return the architecture that a checkpoint's config.json names.

    Raises:
        ValueError: if no family has it.
    """
    model_type = config.get("model_type")
    for family in FAMILIES:
        if family.architecture.model_type == model_type:
            return family.architecture
    raise ValueError(
        f"the checkpoint's config.json has model_type {model_type!r}, which torchtune 0.6.1 cannot "
        f"build; {supported()}. transformers' own code may score it: --config hf/causal_lm"
        " checkpointer.checkpoint_dir=..."
    )


def check_architecture(config: HFConfig) -> None:
    """Refuse checkpoints that no family's builder computes.

    Raises:
        ValueError: for an unknown model_type, a head other than a language model's, or attention that no
            builder computes.
    """
    architecture_of(config)
    for architecture in config.get("architectures") or ():
        if not architecture.endswith("ForCausalLM"):
            raise ValueError(
                f"the checkpoint is a {architecture}, which gives no probability of a next token; "
                "only ...ForCausalLM can be scored"
            )
    for key in ("use_bidirectional_attention", "per_layer_config"):
        if config.get(key):
            raise ValueError(f"config.json has {key}={config[key]}, which torchtune 0.6.1 cannot build")


def correct(model: TransformerDecoder, builder: str, config: HFConfig | None) -> list[str]:
    """Change, in place, what the builder computes differently from transformers.

    Call it once after building, before weights are loaded, sharded, quantised or compiled; parameter names do
    not change. The scorer must apply ``model.final_logit_softcap`` (a number or None) to the logits. Every
    layer gets ``attn.sliding_window`` (tokens or None).

    Args:
        model: what the builder returned, on any device, meta included.
        builder: the builder's dotted path, ``model._component_`` of the config.
        config: the checkpoint's config.json, or None if it has none.

    Returns:
        One line per correction, for the result.

    Raises:
        ValueError: if the family or the architecture is not supported, or config.json lacks a size.
    """
    family = family_of(builder)
    if config is not None:
        check_architecture(config)
    if not hasattr(model, "final_logit_softcap"):
        model.final_logit_softcap = None
    notes = []
    if family.corrections:
        facts = None if config is None else architecture_of(config).facts(config)
        notes = [note for correction in family.corrections for note in correction(model, builder, facts)]
    for layer in model.layers:
        if not hasattr(layer.attn, "sliding_window"):
            layer.attn.sliding_window = None
    return notes
