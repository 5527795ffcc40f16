"""The data factories that a config's ``dataset`` section names: ``ppl_eval.data.<factory>``.

``python_docs``, ``text_files``, ``hub_text`` and ``lm_eval_task`` are text, ``token_files`` are ids, ``chat``
and ``sft`` are samples for fine-tuning (``sft``: any dataset that torchtune trains on); ``domains`` groups
sources, ``suite`` takes a folder of named data sets. Any class with the interface of ``sources.Source`` may
stand in their place.
"""

from ppl_eval.data.chats import chat
from ppl_eval.data.lm_eval_tasks import lm_eval_task
from ppl_eval.data.sources import domains
from ppl_eval.data.suites import suite
from ppl_eval.data.text_sources import TextSource, hub_text, python_docs, text_files
from ppl_eval.data.token_sources import token_files
from ppl_eval.data.torchtune_datasets import sft

__all__ = [
    "TextSource",
    "chat",
    "domains",
    "hub_text",
    "lm_eval_task",
    "python_docs",
    "sft",
    "suite",
    "text_files",
    "token_files",
]
