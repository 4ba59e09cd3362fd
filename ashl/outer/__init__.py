"""What is done with the merged update: the outer optimizer of a stage, beside the one that steps on
the workers.

    step(moments, params, update, inner_lr) -> (moments, params)

`update` is Σ c_i·Δ_i, so that its negative is what papers call the pseudo-gradient; a pure function
of flat vectors [d], the same on a server and on every rank of an all-reduce. Moments are kept over
a stage's border as the schedule's `momentum` says, and start anew where the stage before had
another outer optimizer.
"""
