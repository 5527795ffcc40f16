"""Text to token ids: any tokenizer, long texts in chunks, worker processes. Imports no torch."""
