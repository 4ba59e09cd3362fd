"""What the merged update is. A rule weighs the workers and folds pushes into one update; what is
then done with it is `ashl.outer`'s:

`scale`, `weigh(workers)`  the coefficients c_i = scale · w_i (Σ w_i = 1)
`accepts(staleness)`       whether a push is used at all; if not, it is dropped and counted
`fold(members, weights)`    the update of the pushes that make a merge
`clip(body)`               what a worker does with its own update, before a codec sees it
"""
