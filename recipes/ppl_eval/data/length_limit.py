"""What a tokenizer's length limit does to chats that are short enough.

``max_seq_len`` of torchtune's chat tokenizers should cut long samples and leave others as they are. In 0.6.1
Qwen2's and Qwen2.5's mask the end token of every sample once a limit is set, so that the model is neither
trained nor scored on where to stop; Llama 2's, Mistral's and Gemma's replace the last token of a sample that
does not end with the assistant's turn by EOS. A limit changes nothing here but samples that it cuts.
"""

import copy
from dataclasses import dataclass
from typing import Any


@dataclass
class LimitEffects:
    """What a limit did to samples within it, and was taken back.

    Attributes:
        num_masked: tokens that it masked.
        num_replaced: tokens that it replaced.
    """

    num_masked: int = 0
    num_replaced: int = 0


def without_side_effects(tokenizer: Any) -> tuple[Any, LimitEffects]:
    """Return a tokenizer whose limit cuts and does nothing else, and what it counts while it is used.

    Args:
        tokenizer: any of torchtune's; one without ``tokenize_messages`` or a limit is returned as it is.
    """
    effects = LimitEffects()
    limit = getattr(tokenizer, "max_seq_len", None)
    if not limit or not hasattr(tokenizer, "tokenize_messages"):
        return tokenizer, effects
    unlimited = copy.copy(tokenizer)
    unlimited.max_seq_len = None
    mended = copy.copy(tokenizer)

    def tokenize_messages(messages: Any, *arguments: Any, **options: Any) -> tuple[list[int], list[bool]]:
        tokens, mask = tokenizer.tokenize_messages(messages, *arguments, **options)
        true_tokens, true_mask = unlimited.tokenize_messages(messages, *arguments, **options)
        if len(true_tokens) > limit:
            return tokens, mask
        effects.num_masked += sum(
            is_masked and not masked for is_masked, masked in zip(mask, true_mask, strict=True)
        )
        effects.num_replaced += sum(is_ != was for is_, was in zip(tokens, true_tokens, strict=True))
        return true_tokens, true_mask

    # torchtune's datasets call the tokenizer, which calls this method of itself.
    mended.tokenize_messages = tokenize_messages
    return mended, effects
