"""Aggregation rules: each weighs the workers and folds pushes into one update, which `ashl.outer`
then applies.

`scale`, `weigh(workers)`  the coefficients c_i = scale · w_i, with Σ w_i = 1
`accepts(staleness)`       True if a push is merged; otherwise it is dropped and counted
`fold(members, weights)`   the update of the pushes of one merge
`clip(body)`               a worker's update, shortened before a codec encodes it

Symbols: w is the global model, n the number of workers, Δ_i the update of worker i and w_i its
weight. b_i is its batch in samples, H_i its number of local steps, n_i the number of samples in its
shard.
"""
