"""The evaluation as a function, for notebooks and training loops: ``from ppl_eval import evaluate``."""
