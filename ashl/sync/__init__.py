"""Sync modes: each defines when a worker may proceed, and what workers exchange.

Each mode is one file and overrides the defaults of the base that its topology requires:
`ServerRule` and `BarrierRule` in `ashl.topology.parameter_server`, `StepRule` in `.all_reduce`,
`RoundRule` and `RoamingRule` in `.gossip`, `PairRule` in `.pairs`, `GroupRule` in
`.group_generator`. `ashl.stage.contract.Rule` holds the attributes that all bases share.
`ashl list` prints the symbols below with each card.

Symbols: w is the global model, x_i the own model of worker i, n the number of workers, d the number
of model elements. H or H_i is the number of local steps between two exchanges. Δ_i is the change of
the model in the local steps of worker i, and g_i its gradient on a minibatch. γ or η is the
learning rate. w_i and scale are the weights and the factor of `aggregate`. Staleness counts the
merges since a worker's pull. A dropped push is part of no merge; its steps are counted as dropped.
"""
