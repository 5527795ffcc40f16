"""Constants and parameter counts of published checkpoints: what a user's config.json will say.

From the config.json files of the named Hugging Face repositories, only keys that bear on arithmetic; counts
are the numbers of parameters that the repositories show. Written down by hand, not derived from torchtune.
"""

from typing import Any, NamedTuple


class Published(NamedTuple):
    """A published checkpoint.

    Attributes:
        repository: On the Hugging Face hub.
        config: Its config.json, without what does not bear on arithmetic.
        num_parameters: Of the whole model, shared weights counted once.
    """

    repository: str
    config: dict[str, Any]
    num_parameters: int


def _llama(
    vocab: int, width: int, hidden: int, layers: int, heads: int, kv_heads: int, **rest: Any
) -> dict[str, Any]:
    sizes = {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    rest = {
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    } | rest
    return sizes | rest


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _gemma(
    width: int, hidden: int, layers: int, heads: int, kv_heads: int, head: int, **rest: Any
) -> dict[str, Any]:
    # Gemma's files do not say that the head is tied: it is transformers' default for them.
    config = _llama(
        256_000, width, hidden, layers, heads, kv_heads, head_dim=head, model_type="gemma", **rest
    )
    del config["tie_word_embeddings"]
    return config | {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "hidden_act": "gelu_pytorch_tanh"}


def _gemma2(
    width: int, hidden: int, layers: int, heads: int, kv_heads: int, head: int, scalar: int
) -> dict[str, Any]:
    return _gemma(width, hidden, layers, heads, kv_heads, head) | {
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    }


def _qwen(
    vocab: int,
    width: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    tied: bool = False,
    eps: float = 1e-6,
) -> dict[str, Any]:
    rest = {"model_type": "qwen2", "rms_norm_eps": eps, "rope_theta": 1e6, "tie_word_embeddings": tied}
    windows = {"use_sliding_window": False, "sliding_window": 32_768, "max_window_layers": layers}
    return _llama(vocab, width, hidden, layers, heads, kv_heads, **rest, **windows)


_CODE = {"rope_theta": 1e6}
_L3 = {"rope_theta": 500_000.0}
_L3_1 = _L3 | {"rope_scaling": _llama3_rope(8.0)}
_L3_2 = _L3 | {"rope_scaling": _llama3_rope(32.0), "tie_word_embeddings": True}
_QWEN_0_5B = _qwen(151_936, 896, 4864, 24, 14, 2, tied=True)
_QWEN_1_5B = _qwen(151_936, 1536, 8960, 28, 12, 2, tied=True)
_QWEN_7B = _qwen(152_064, 3584, 18_944, 28, 28, 4)
_QWEN_14B = (152_064, 5120, 13_824, 48, 40, 8)
_QWEN_32B = (152_064, 5120, 27_648, 64, 40, 8)
_QWEN_72B = (152_064, 8192, 29_568, 80, 64, 8)

# By the dotted path of torchtune's builder, less "torchtune.models.".
PUBLISHED: dict[str, Published] = {
    "llama2.llama2_7b": Published(
        "meta-llama/Llama-2-7b-hf", _llama(32_000, 4096, 11_008, 32, 32, 32), 6_738_415_616
    ),
    "llama2.llama2_13b": Published(
        "meta-llama/Llama-2-13b-hf", _llama(32_000, 5120, 13_824, 40, 40, 40), 13_015_864_320
    ),
    "llama2.llama2_70b": Published(
        "meta-llama/Llama-2-70b-hf", _llama(32_000, 8192, 28_672, 80, 64, 8), 68_976_648_192
    ),
    "code_llama2.code_llama2_7b": Published(
        "codellama/CodeLlama-7b-hf", _llama(32_016, 4096, 11_008, 32, 32, 32, **_CODE), 6_738_546_688
    ),
    "code_llama2.code_llama2_13b": Published(
        "codellama/CodeLlama-13b-hf", _llama(32_016, 5120, 13_824, 40, 40, 40, **_CODE), 13_016_028_160
    ),
    "code_llama2.code_llama2_70b": Published(
        "codellama/CodeLlama-70b-hf", _llama(32_016, 8192, 28_672, 80, 64, 8, **_CODE), 68_976_910_336
    ),
    "llama3.llama3_8b": Published(
        "meta-llama/Meta-Llama-3-8B", _llama(128_256, 4096, 14_336, 32, 32, 8, **_L3), 8_030_261_248
    ),
    "llama3.llama3_70b": Published(
        "meta-llama/Meta-Llama-3-70B", _llama(128_256, 8192, 28_672, 80, 64, 8, **_L3), 70_553_706_496
    ),
    "llama3_1.llama3_1_8b": Published(
        "meta-llama/Llama-3.1-8B", _llama(128_256, 4096, 14_336, 32, 32, 8, **_L3_1), 8_030_261_248
    ),
    "llama3_1.llama3_1_70b": Published(
        "meta-llama/Llama-3.1-70B", _llama(128_256, 8192, 28_672, 80, 64, 8, **_L3_1), 70_553_706_496
    ),
    "llama3_1.llama3_1_405b": Published(
        "meta-llama/Llama-3.1-405B", _llama(128_256, 16_384, 53_248, 126, 128, 8, **_L3_1), 405_853_388_800
    ),
    "llama3_2.llama3_2_1b": Published(
        "meta-llama/Llama-3.2-1B", _llama(128_256, 2048, 8192, 16, 32, 8, head_dim=64, **_L3_2), 1_235_814_400
    ),
    "llama3_2.llama3_2_3b": Published(
        "meta-llama/Llama-3.2-3B",
        _llama(128_256, 3072, 8192, 28, 24, 8, head_dim=128, **_L3_2),
        3_212_749_824,
    ),
    "llama3_3.llama3_3_70b": Published(
        "meta-llama/Llama-3.3-70B-Instruct", _llama(128_256, 8192, 28_672, 80, 64, 8, **_L3_1), 70_553_706_496
    ),
    "mistral.mistral_7b": Published(
        "mistralai/Mistral-7B-v0.1",
        _llama(
            32_000, 4096, 14_336, 32, 32, 8, model_type="mistral", sliding_window=4096, rope_theta=10_000.0
        ),
        7_241_732_096,
    ),
    "gemma.gemma_2b": Published("google/gemma-2b", _gemma(2048, 16_384, 18, 8, 1, 256), 2_506_172_416),
    "gemma.gemma_7b": Published("google/gemma-7b", _gemma(3072, 24_576, 28, 16, 16, 256), 8_537_680_896),
    "gemma2.gemma2_2b": Published(
        "google/gemma-2-2b", _gemma2(2304, 9216, 26, 8, 4, 256, 256), 2_614_341_888
    ),
    "gemma2.gemma2_9b": Published(
        "google/gemma-2-9b", _gemma2(3584, 14_336, 42, 16, 8, 256, 256), 9_241_705_984
    ),
    "gemma2.gemma2_27b": Published(
        "google/gemma-2-27b", _gemma2(4608, 36_864, 46, 32, 16, 128, 144), 27_227_128_320
    ),
    "phi3.phi3_mini": Published(
        "microsoft/Phi-3-mini-4k-instruct",
        _llama(32_064, 3072, 8192, 32, 32, 32, model_type="phi3", sliding_window=2047, rope_theta=10_000.0),
        3_821_079_552,
    ),
    "phi4.phi4_14b": Published(
        "microsoft/phi-4",
        _llama(100_352, 5120, 17_920, 40, 40, 10, model_type="phi3", sliding_window=None, rope_theta=250_000),
        14_659_507_200,
    ),
    "qwen2.qwen2_0_5b": Published("Qwen/Qwen2-0.5B", _QWEN_0_5B, 494_032_768),
    "qwen2.qwen2_1_5b": Published("Qwen/Qwen2-1.5B", _QWEN_1_5B, 1_543_714_304),
    "qwen2.qwen2_7b": Published("Qwen/Qwen2-7B", _QWEN_7B, 7_615_616_512),
    "qwen2_5.qwen2_5_0_5b": Published("Qwen/Qwen2.5-0.5B", _QWEN_0_5B, 494_032_768),
    "qwen2_5.qwen2_5_1_5b_base": Published("Qwen/Qwen2.5-1.5B", _QWEN_1_5B, 1_543_714_304),
    "qwen2_5.qwen2_5_1_5b_instruct": Published("Qwen/Qwen2.5-1.5B-Instruct", _QWEN_1_5B, 1_543_714_304),
    "qwen2_5.qwen2_5_3b": Published(
        "Qwen/Qwen2.5-3B", _qwen(151_936, 2048, 11_008, 36, 16, 2, tied=True), 3_085_938_688
    ),
    "qwen2_5.qwen2_5_7b_base": Published("Qwen/Qwen2.5-7B", _QWEN_7B, 7_615_616_512),
    "qwen2_5.qwen2_5_7b_instruct": Published("Qwen/Qwen2.5-7B-Instruct", _QWEN_7B, 7_615_616_512),
    "qwen2_5.qwen2_5_14b_base": Published("Qwen/Qwen2.5-14B", _qwen(*_QWEN_14B, eps=1e-5), 14_770_033_664),
    "qwen2_5.qwen2_5_14b_instruct": Published("Qwen/Qwen2.5-14B-Instruct", _qwen(*_QWEN_14B), 14_770_033_664),
    "qwen2_5.qwen2_5_32b_base": Published("Qwen/Qwen2.5-32B", _qwen(*_QWEN_32B, eps=1e-5), 32_763_876_352),
    "qwen2_5.qwen2_5_32b_instruct": Published("Qwen/Qwen2.5-32B-Instruct", _qwen(*_QWEN_32B), 32_763_876_352),
    "qwen2_5.qwen2_5_72b_base": Published("Qwen/Qwen2.5-72B", _qwen(*_QWEN_72B, eps=1e-5), 72_706_203_648),
    "qwen2_5.qwen2_5_72b_instruct": Published("Qwen/Qwen2.5-72B-Instruct", _qwen(*_QWEN_72B), 72_706_203_648),
}

SMOLLM2 = Published(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    _llama(49_152, 576, 1536, 30, 9, 3, rope_theta=100_000, tie_word_embeddings=True),
    134_515_008,
)

# Of builders that take the sizes from the config: by the config's name.
BY_CONFIG: dict[str, Published] = {
    "qwen3/0.6B": Published(
        "Qwen/Qwen3-0.6B-Base",
        {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": 28,
        },
        596_049_920,
    ),
    "qwen3/1.7B": Published(
        "Qwen/Qwen3-1.7B-Base",
        {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": 28,
        },
        1_720_574_976,
    ),
    "qwen3/4B": Published(
        "Qwen/Qwen3-4B-Base",
        {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": 36,
        },
        4_022_468_096,
    ),
    "qwen3/8B": Published(
        "Qwen/Qwen3-8B-Base",
        {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": 36,
        },
        8_190_735_360,
    ),
    "qwen3/14B": Published(
        "Qwen/Qwen3-14B-Base",
        {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": 40,
        },
        14_768_307_200,
    ),
    "qwen3/32B": Published(
        "Qwen/Qwen3-32B",
        {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": 64,
        },
        32_762_123_264,
    ),
    "olmo2/1B": Published(
        "allenai/OLMo-2-0425-1B",
        {
            "model_type": "olmo2",
            "vocab_size": 100352,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "rms_norm_eps": 1e-06,
            "rope_theta": 500000,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
        },
        1_484_916_736,
    ),
    "olmo2/7B": Published(
        "allenai/OLMo-2-1124-7B",
        {
            "model_type": "olmo2",
            "vocab_size": 100352,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-06,
            "rope_theta": 500000,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
        },
        7_298_617_344,
    ),
    "olmo2/13B": Published(
        "allenai/OLMo-2-1124-13B",
        {
            "model_type": "olmo2",
            "vocab_size": 100352,
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
            "rms_norm_eps": 1e-06,
            "rope_theta": 500000,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
        },
        13_716_198_400,
    ),
    "olmo2/32B": Published(
        "allenai/OLMo-2-0325-32B",
        {
            "model_type": "olmo2",
            "vocab_size": 100352,
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_theta": 500000,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
        },
        32_234_279_936,
    ),
    "mistral_nemo/12B": Published(
        "mistralai/Mistral-Nemo-Base-2407",
        {
            "model_type": "mistral",
            "vocab_size": 131072,
            "hidden_size": 5120,
            "intermediate_size": 14336,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "sliding_window": None,
        },
        12_247_782_400,
    ),
    "mistral_nemo/24B": Published(
        "mistralai/Mistral-Small-24B-Base-2501",
        {
            "model_type": "mistral",
            "vocab_size": 131072,
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-05,
            "rope_theta": 100000000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "sliding_window": None,
        },
        23_572_403_200,
    ),
    "granite3/2B": Published(
        "ibm-granite/granite-3.1-2b-base",
        {
            "model_type": "granite",
            "vocab_size": 49155,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 5000000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.015625,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
        2_533_531_648,
    ),
    "granite3/8B": Published(
        "ibm-granite/granite-3.1-8b-base",
        {
            "model_type": "granite",
            "vocab_size": 49155,
            "hidden_size": 4096,
            "intermediate_size": 12800,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.0078125,
            "residual_multiplier": 0.22,
            "logits_scaling": 16.0,
        },
        8_170_848_256,
    ),
    "gemma3/1B": Published(
        "google/gemma-3-1b-pt",
        {
            "model_type": "gemma3_text",
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": False,
        },
        999_885_952,
    ),
    "smollm3/3B": Published(
        "HuggingFaceTB/SmolLM3-3B-Base",
        {
            "model_type": "smollm3",
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_theta": 5000000.0,
            "rope_scaling": None,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "no_rope_layers": [
                1,
                1,
                1,
                0,
                1,
                1,
                1,
                0,
                1,
                1,
                1,
                0,
                1,
                1,
                1,
                0,
                1,
                1,
                1,
                0,
                1,
                1,
                1,
                0,
                1,
                1,
                1,
                0,
                1,
                1,
                1,
                0,
                1,
                1,
                1,
                0,
            ],
            "use_sliding_window": False,
            "sliding_window": None,
        },
        3_075_098_624,
    ),
}
