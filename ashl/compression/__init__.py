"""Compression methods, one per file; `ashl.compression.contract` defines what a codec is."""
