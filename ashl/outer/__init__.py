"""Outer optimizers: each applies the merged update to the model, beside the optimizer that steps on
the workers.

    step(moments, params, update, inner_lr) -> (moments, params)

`update` is Σ c_i·Δ_i; its negative is the pseudo-gradient of the literature. `step` is a pure
function of flat vectors [d], the same on a server and on every rank of an all-reduce. At a stage
boundary moments are kept or reset by the schedule's `momentum`; they are always reset if the outer
optimizer changes.

Symbols: w is the global model, and Δ_i the update of worker i in a merge. c_i = scale · w_i is its
coefficient by `aggregate`. Moments such as m and v start from zero unless stated.
"""
