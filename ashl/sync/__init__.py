"""Sync modes: each defines when a worker may proceed, and what workers exchange.

Each mode is one file and overrides the defaults of the base that its topology requires:
`ServerRule` and `BarrierRule` in `ashl.topology.parameter_server`, `StepRule` in `.all_reduce`,
`RoundRule` and `RoamingRule` in `.gossip`, `PairRule` in `.pairs`, `GroupRule` in
`.group_generator`. `ashl.stage.stage.Rule` holds the attributes that all bases share.

Symbols in all cards: w is the global model, x_i the own model of worker i, n the number of workers,
H the local steps between two exchanges. Δ_i is the change of the model in the H local steps of
worker i, g_i the gradient of its minibatch. w_i are the weights and `scale` the factor of
`aggregate`, γ or η is the learning rate. A push is *dropped and counted* if it is not merged; its
steps then appear in the run's dropped steps.
"""
