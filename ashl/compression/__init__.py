"""How an update travels: one method a file. What a codec is says `ashl.compression.contract`."""
