"""The shipped configs, one folder a model family; `ppl-eval ls` lists them."""
