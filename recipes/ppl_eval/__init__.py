"""Exact language-model perplexity, for torchtune models, on any number of processes."""

import os

__version__ = "0.1.0"

# MKL's matrix products depend in their last bit on how many threads share them, and torchrun gives ranks one
# thread where a single process takes all cores. This mode costs nothing measurable, and is read at MKL's
# first call.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
