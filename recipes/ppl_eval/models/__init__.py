"""Decoders as they are scored: families, corrections of torchtune, attention, facts of a built model."""
