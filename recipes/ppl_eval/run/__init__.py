"""What one run scores: its settings read into tokenizer, protocol, tokens and plan."""
