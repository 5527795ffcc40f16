"""Quantisation on load, with an account of what was done to which layer."""

from ppl_eval.quantization.awq import awq

__all__ = ["awq"]
