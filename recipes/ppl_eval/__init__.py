"""Exact language-model perplexity, for torchtune models, on any number of processes."""

__version__ = "0.1.0"
