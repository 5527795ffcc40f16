"""Exact language-model perplexity, for torchtune models, on any number of processes.

from ppl_eval import evaluate

result = evaluate("smollm2/135M_ppl", overrides={"max_windows": 8})
result.perplexity, result.interval
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# MKL's matrix products depend in their last bit on how many threads share them, and torchrun gives ranks one
# thread where a single process takes all cores. This mode costs nothing measurable, and is read at MKL's
# first call.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

if TYPE_CHECKING:
    from ppl_eval.api.evaluation import evaluate
    from ppl_eval.api.result import Result
    from ppl_eval.distributed.embedded import EvaluationError, InputError

__all__ = ["EvaluationError", "InputError", "Result", "__version__", "evaluate"]

# Imported when asked for: torch and torchtune take seconds.
_PLACES = {
    "EvaluationError": "ppl_eval.distributed.embedded",
    "InputError": "ppl_eval.distributed.embedded",
    "Result": "ppl_eval.api.result",
    "evaluate": "ppl_eval.api.evaluation",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
