"""Outer optimizers: each applies the merged update to the model, beside the optimizer that steps on
the workers.

    step(moments, params, update, inner_lr) -> (moments, params)

`update` is Σ c_i·Δ_i; its negative is the pseudo-gradient of the literature. `step` is a pure
function of flat vectors [d], the same on a server and on every rank of an all-reduce. At a stage
boundary moments are kept or reset by the schedule's `momentum`; they are always reset if the outer
optimizer changes.
"""
