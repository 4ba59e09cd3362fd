"""How an update is written: the body's header, and the codes for values, places and signs."""
