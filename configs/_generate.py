"""Writes the shipped configs: `python configs/_generate.py`, or `make configs`.

Every file is complete, so that a person can read it alone, copy it out and edit it. What they must all
agree in is said here once, and a test compares the files with what this writes.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtune.config._utils import _get_component_from_path

FOLDER = Path(__file__).parent
GIB = 2**30
# Activations, logits (max_logits_mib) and the CUDA context, rounded up.
WORKING_GIB = 3
GROUPSIZE = 128
UNKNOWN = "no published number that we know of"


@dataclass(frozen=True)
class Model:
    """What one model's configs do not share with the others.

    Attributes:
        family: Folder, and torchtune's package of builders.
        size: First part of the file names.
        builder: torchtune's builder in that package.
        model_type: The checkpointer's.
        repository: Of the weights, on the Hugging Face hub.
        download: Further arguments of `tune download`.
        devices: Processes in the launch line of full precision: copies of the model, or parts from `sharded`.
        sharded: Whether full precision is split over the devices.
        batch_size: Windows a batch.
        expected: Published perplexity, with protocol and source.
        expected_int4: The same for the int4 file.
        remarks: Further lines for the head of both files.
    """

    family: str
    size: str
    builder: str
    model_type: str
    repository: str
    download: str = ""
    devices: int = 2
    sharded: bool = False
    batch_size: int = 4
    expected: str = UNKNOWN
    expected_int4: str = UNKNOWN
    remarks: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Where the launch line's user keeps the weights."""
        return f"models/{self.repository.partition('/')[2]}"


AWQ = "with this protocol (AWQ, arXiv:2306.00978, table 4)"
QUIP = "with protocol.max_seq_len=4096 (QuIP#, arXiv:2402.04396)"
RTN = "for rounding to nearest in groups of 128, head in full precision (AWQ, arXiv:2306.00978, table 4)"
LLAMA3 = "with this protocol, published to one decimal (arXiv:2404.14047)"
CODE = "The model is meant for code; to score yours, take dataset._component_ ppl_eval.data.text_files."
INSTRUCT = "There is no base model: this one is tuned to follow instructions, not to continue plain text."
MISTRAL = "v0.2 and v0.3 differ in RoPE base and vocabulary; the check against config.json says what to set."

TOKEN = "--hf-token <HF_TOKEN>"
META = {"download": f'--ignore-patterns "original/*" {TOKEN}'}
GOOGLE = {"download": f'--ignore-patterns "*.gguf" {TOKEN}'}
LLAMA2 = {"download": f'--ignore-patterns "*.bin" {TOKEN}'}
CODE_LLAMA = {"download": '--ignore-patterns "*.bin"', "remarks": (CODE,)}
LARGE = {"devices": 8, "sharded": True, "batch_size": 1}


def _model(family: str, size: str, repository: str, model_type: str, builder: str = "", **rest: Any) -> Model:
    builder = builder or f"{family}_{size.lower().replace('.', '_')}"
    return Model(family, size, builder, model_type, repository, **rest)


def _llama2(size: str, paper: str, longer: str, rounded: str, **rest: Any) -> Model:
    rest |= {"expected": f"{paper} {AWQ}; {longer} {QUIP}", "expected_int4": f"{rounded} {RTN}"}
    return _model("llama2", size, f"meta-llama/Llama-2-{size.lower()}-hf", "LLAMA2", **LLAMA2, **rest)


def _qwen2_5(size: str, base: str = "", **rest: Any) -> Model:
    if base:
        instruct = f"torchtune.models.qwen2_5.{base.removesuffix('_base')}_instruct"
        rest["remarks"] = (f"Qwen2.5-{size}-Instruct needs model._component_={instruct}.",)
    return _model("qwen2_5", size, f"Qwen/Qwen2.5-{size}", "QWEN2", base, **rest)


MODELS = (
    _llama2("7B", "5.47", "5.12", "5.73"),
    _llama2("13B", "4.88", "4.57", "4.98"),
    _llama2("70B", "3.32", "3.12", "3.46", **LARGE),
    _model("code_llama2", "7B", "codellama/CodeLlama-7b-hf", "LLAMA2", **CODE_LLAMA),
    _model("code_llama2", "13B", "codellama/CodeLlama-13b-hf", "LLAMA2", **CODE_LLAMA),
    _model("code_llama2", "70B", "codellama/CodeLlama-70b-hf", "LLAMA2", **CODE_LLAMA, **LARGE),
    _model("llama3", "8B", "meta-llama/Meta-Llama-3-8B", "LLAMA3", expected=f"6.1 {LLAMA3}", **META),
    _model(
        "llama3", "70B", "meta-llama/Meta-Llama-3-70B", "LLAMA3", expected=f"2.9 {LLAMA3}", **META, **LARGE
    ),
    _model("llama3_1", "8B", "meta-llama/Llama-3.1-8B", "LLAMA3", **META),
    _model("llama3_1", "70B", "meta-llama/Llama-3.1-70B", "LLAMA3", **META, **LARGE),
    _model("llama3_1", "405B", "meta-llama/Llama-3.1-405B", "LLAMA3", **META, **LARGE | {"devices": 16}),
    _model("llama3_2", "1B", "meta-llama/Llama-3.2-1B", "LLAMA3_2", **META),
    _model("llama3_2", "3B", "meta-llama/Llama-3.2-3B", "LLAMA3_2", **META),
    _model(
        "llama3_3", "70B", "meta-llama/Llama-3.3-70B-Instruct", "LLAMA3", remarks=(INSTRUCT,), **META, **LARGE
    ),
    _model("mistral", "7B", "mistralai/Mistral-7B-v0.1", "MISTRAL", remarks=(MISTRAL,), **LLAMA2),
    _model("gemma", "2B", "google/gemma-2b", "GEMMA", **GOOGLE),
    _model("gemma", "7B", "google/gemma-7b", "GEMMA", **GOOGLE),
    _model("gemma2", "2B", "google/gemma-2-2b", "GEMMA2", **GOOGLE),
    _model("gemma2", "9B", "google/gemma-2-9b", "GEMMA2", **GOOGLE),
    _model("gemma2", "27B", "google/gemma-2-27b", "GEMMA2", **GOOGLE),
    _model("phi3", "mini", "microsoft/Phi-3-mini-4k-instruct", "PHI3_MINI", remarks=(INSTRUCT,)),
    _model("phi4", "14B", "microsoft/phi-4", "PHI4", remarks=(INSTRUCT,)),
    _model("qwen2", "0.5B", "Qwen/Qwen2-0.5B", "QWEN2"),
    _model("qwen2", "1.5B", "Qwen/Qwen2-1.5B", "QWEN2"),
    _model("qwen2", "7B", "Qwen/Qwen2-7B", "QWEN2"),
    _qwen2_5("0.5B"),
    _qwen2_5("1.5B", "qwen2_5_1_5b_base"),
    _qwen2_5("3B"),
    _qwen2_5("7B", "qwen2_5_7b_base"),
    _qwen2_5("14B", "qwen2_5_14b_base"),
    _qwen2_5("32B", "qwen2_5_32b_base"),
    _qwen2_5("72B", "qwen2_5_72b_base", **LARGE),
)


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's weights in bf16: all, those of linear layers, and the largest piece gathered."""

    all: int
    linear: int
    largest_piece: int


@functools.cache
def sizes(builder: str) -> Sizes:
    """Sizes read from the built model."""
    with torch.device("meta"):
        model = _get_component_from_path(builder)()
    count = {name: sum(p.numel() for p in module.parameters()) for name, module in model.named_children()}
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    largest = max(count["layers"] // len(model.layers), model.tok_embeddings.weight.numel())
    return Sizes(2 * sum(count.values()), 2 * linear, 2 * largest)


def memory(model: Model, int4: bool) -> str:
    """What a device needs."""
    size = sizes(f"torchtune.models.{model.family}.{model.builder}")
    if int4:
        # Half a byte a weight, and for each group a scale and a zero point in bf16.
        packed = size.linear / 2 * (0.5 + 4 / GROUPSIZE) + size.all - size.linear
        return (
            f"{size.all / GIB + WORKING_GIB:.0f} GiB a device while full-precision weights are packed, then "
            f"{packed / GIB + WORKING_GIB:.0f} GiB, {packed / GIB:.1f} of it weights"
        )
    if not model.sharded:
        return f"{size.all / GIB + WORKING_GIB:.0f} GiB a device, {size.all / GIB:.1f} of it weights"
    # One layer is in use while the next is being gathered.
    need = (size.all / model.devices + 2 * size.largest_piece) / GIB + WORKING_GIB
    return f"{need:.0f} GiB a device: {size.all / GIB:.0f} GiB of weights are split over {model.devices}"


def head(model: Model, int4: bool) -> list[str]:
    """The comment at the head: what it measures, how to get the weights, launch, memory, expectation."""
    name = model.repository.partition("/")[2]
    precision = f"int4 weights in groups of {GROUPSIZE}" if int4 else "bf16"
    config = f"{model.family}/{model.size}_ppl" + ("_int4" if int4 else "")
    # Quantised weights cannot be split: each device has them all and scores its own windows.
    devices = 2 if int4 else model.devices
    nodes = f"--nnodes {devices // 8} --nproc_per_node 8" if devices > 8 else f"--nproc_per_node {devices}"
    lines = [
        f"Perplexity of {name} ({precision}) on the raw test text of WikiText-2, in windows of 2,048 tokens",
        "side by side. Any number of devices gives the same bits.",
        "",
        f"Weights:  tune download {model.repository} --output-dir {model.folder} {model.download}".rstrip(),
        f"Launch:   tune run {nodes} distributed_ppl_eval --config {config}",
        f"Memory:   {memory(model, int4)}.",
        f"Expected: {model.expected_int4 if int4 else model.expected}.",
    ]
    if devices > 8:
        lines += [
            "",
            "On both: export PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=<host>:29500 PET_RDZV_ID=<job>",
        ]
    if int4:
        lines += ["", "Quantised on load. baseline=<result.json of full precision> says what that costs."]
        if model.sharded:
            lines.append("Quantised weights cannot be split over devices: every device holds all of them.")
    if model.remarks:
        lines += ["", *model.remarks]
    return [f"# {line}".rstrip() for line in lines]


def text(model: Model, int4: bool) -> str:
    """A whole config file."""
    files = "${checkpointer.checkpoint_dir}"
    # torchtune's reader needs a BOS, which Qwen names in generation_config.json only.
    extra = "generation_config" if model.model_type == "QWEN2" else "tokenizer_config"
    name = f"{model.family}-{model.size.lower()}-ppl" + ("-int4" if int4 else "")
    sections = [
        *head(model, int4),
        "",
        f"output_dir: runs/{name}",
        "",
        "model:",
        f"  _component_: torchtune.models.{model.family}.{model.builder}",
        "",
        "tokenizer:",
        "  _component_: torchtune.modules.transforms.tokenizers.HuggingFaceBaseTokenizer",
        f"  tokenizer_json_path: {files}/tokenizer.json",
        f"  {extra}_{'' if extra == 'generation_config' else 'json_'}path: {files}/{extra}.json",
        "",
        "checkpointer:",
        "  _component_: torchtune.training.FullModelHFCheckpointer",
        f"  checkpoint_dir: {model.folder}",
        f"  model_type: {model.model_type}",
        "",
    ]
    if int4:
        sections += [
            "quantizer:",
            "  _component_: torchtune.training.quantization.Int4WeightOnlyQuantizer",
            f"  groupsize: {GROUPSIZE}",
            "",
        ]
    sections += [
        "dataset:",
        "  _component_: ppl_eval.data.hub_text",
        "  name: Salesforce/wikitext",
        "  config_name: wikitext-2-raw-v1",
        "  split: test",
        "protocol:",
        "  _component_: ppl_eval.protocols.disjoint",
        "  max_seq_len: 2048",
        "",
        f"batch_size: {model.batch_size}",
    ]
    if model.sharded and not int4:
        sections.append("data_parallel_shard_dim: -1 # the weights are split over all devices")
    sections += ["device: cuda", "dtype: bf16", "seed: 42"]
    return "\n".join(sections) + "\n"


def files() -> dict[Path, str]:
    """Path to content of every file that this writes."""
    return {
        FOLDER / model.family / f"{model.size}_ppl{'_int4' if int4 else ''}.yaml": text(model, int4)
        for model in MODELS
        for int4 in (False, True)
    }


if __name__ == "__main__":
    for path, content in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    print(f"{len(files())} configs written")
