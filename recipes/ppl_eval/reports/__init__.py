"""Readers of finished runs: comparisons, the report, snippets for model cards."""
