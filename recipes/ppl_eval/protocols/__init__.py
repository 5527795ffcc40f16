"""Documents to windows to batches: the protocols that a config's ``protocol`` section names, and the plan.

One module a protocol. Its class has the name that configs use here, so a new protocol is one module and one
line below; a protocol of a user's own is a class in any importable module, named by its dotted path.
"""

from ppl_eval.protocols.disjoint import Disjoint as disjoint
from ppl_eval.protocols.llama_cpp import LlamaCpp as llama_cpp
from ppl_eval.protocols.megatron import Megatron as megatron
from ppl_eval.protocols.per_sample import PerSample as per_sample
from ppl_eval.protocols.rolling import Rolling as rolling
from ppl_eval.protocols.strided import Strided as strided

__all__ = ["disjoint", "llama_cpp", "megatron", "per_sample", "rolling", "strided"]
