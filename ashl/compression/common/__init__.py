"""Code that several codecs share: base classes, selection, sketches, measured guarantees."""
