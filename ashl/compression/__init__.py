"""How an update travels: `encode(sender, x)` gives the body on the wire, `decode(receiver, body)` the update.

State is explicit and belongs to the link. `undo(sender, body)` gives back to the sender what was dropped on the way.
"""
