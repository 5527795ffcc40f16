"""Documents to windows to batches: the protocols that a config's ``protocol`` section names, and the plan."""

from ppl_eval.protocols.disjoint import disjoint, per_sample, rolling, strided
from ppl_eval.protocols.llama_cpp import llama_cpp, megatron

__all__ = ["disjoint", "llama_cpp", "megatron", "per_sample", "rolling", "strided"]
