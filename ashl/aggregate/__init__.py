"""Aggregation rules: each weighs the workers and folds pushes into one update, which `ashl.outer`
then applies.

`scale`, `weigh(workers)`  the coefficients c_i = scale · w_i, with Σ w_i = 1
`accepts(staleness)`       True if a push is merged; otherwise it is dropped and counted
`fold(members, weights)`   the update of the pushes of one merge
`clip(body)`               a worker's update, shortened before a codec encodes it
"""
