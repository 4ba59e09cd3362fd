"""What the model becomes. A rule weighs the workers and folds pushes into one update:

`scale`, `weigh(workers)`  the coefficients c_i = scale · w_i (Σ w_i = 1)
`accepts(staleness)`       whether a push is used at all; if not, it is dropped and counted
`fold(stage, memory, members)`  (memory, update) of the pushes that make a merge
`clip(body)`, `outer(memory, total)`  what fold does with each push, and with their weighted sum: for sums that no
                           server makes
"""
