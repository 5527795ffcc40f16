"""The data factories that a config's ``dataset`` section names: ``ppl_eval.data.<factory>``.

``python_docs``, ``text_files``, ``hub_text`` and ``lm_eval_task`` are text; ``domains`` groups sources.
"""

from ppl_eval.lm_eval_data import lm_eval_task
from ppl_eval.sources import TextSource, domains
from ppl_eval.text_sources import hub_text, python_docs, text_files

__all__ = ["TextSource", "domains", "hub_text", "lm_eval_task", "python_docs", "text_files"]
