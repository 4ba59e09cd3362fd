"""What the model becomes. A rule weighs the workers and folds pushes:

`scale`, `weigh(workers)`           the coefficients c_i = scale·w_i (Σ w_i = 1)
`fold(stage, buffer, push)`         (buffer, update): the update when enough pushes have come, else None
"""
