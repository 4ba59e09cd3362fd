"""Who may go on: one sync mode a file, each the rule that its topology's loop asks.

A mode says only what differs from the defaults of its base: `ServerRule` and `BarrierRule` in
`ashl.topology.parameter_server`, `StepRule` in `.all_reduce`, `RoundRule` and `RoamingRule` in
`.gossip`, `PairRule` in `.pairs`, `GroupRule` in `.group_rule`. What all of them say is in
`ashl.stage.stage`.
"""
