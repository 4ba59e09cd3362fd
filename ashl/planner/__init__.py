"""How much each worker does: local steps H, share of the data and compression ratio, from a
profile.

`assign(profile, h_preset, r_preset, payload)`   one `Assignment` per worker, in the order of ranks

`h_preset` is the slowest worker's H and `r_preset` the preset share of an update that is kept (None
= all of it, and nothing is encoded). `payload(ratio)` gives the bytes on the wire of an update
compressed to that ratio, as a share of the dense model's. All sums are in the clock's integer
nanoseconds, so that a half is a half and a tie is a tie.
"""
