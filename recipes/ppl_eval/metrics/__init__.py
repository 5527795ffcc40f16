"""Exact sums and the figures made from them."""
