"""What is kept, clipped or scheduled around any codec, on a link."""
