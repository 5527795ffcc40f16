"""The `ppl-eval` command."""
