"""Encoding of payloads: the header, and the codes of values, indices, signs and levels."""
