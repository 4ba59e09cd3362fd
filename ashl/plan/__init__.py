"""The nouns between configuration and run: what each stage does and what each worker does in it."""
