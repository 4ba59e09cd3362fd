"""Planners, which choose local steps H, share of the data and density of each worker from a
profile.

`assign(profile, h_preset, r_preset, payload)` returns one `Assignment` per worker, in rank order.
`h_preset` is the slowest worker's H. `r_preset` is the preset density of an update (None = dense,
and nothing is encoded). `payload(ratio)` is the encoded size of an update at that density, as a
share of the dense size. All times are integer nanoseconds, so that ties and halves are exact.
"""
