"""What a codec is, and what those of a family share."""
