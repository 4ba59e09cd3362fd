"""Who may go on. A sync mode is a small rule that a topology's loop asks:

`exchange`      what travels: "gradient" (the optimizer steps after averaging), "difference" (it steps on the worker) or
                "accumulated" (both: Σ lr·gradient on the model as pulled, and the optimizer steps on that)
`quorum(n)`     how many pushes make a merge
`averages`      whether weights are renormalised over the pushes of a merge, instead of adding up to 1 over all workers
`accepts(staleness)`  whether a push is used at all; if not, it is dropped and counted
`admit(tally)`  the waiting workers that may go on now
`local_steps`   H between two exchanges; "plan" = the plan's, by worker
`topologies`    the topologies in which the rule makes sense

A rule that steers more than that keeps its state in `tally.rule_state` and has of these what it needs:

`observe(stage, tally, push, now_s)`  a push has come
`steer(stage, tally, rank, now_s)`    what a worker that goes on does next: (H, ratio, seconds instead of H),
                                      and, where it is to change, its batch
`interval_s`                          seconds of the first local work, where seconds count instead of H
`anneal(tally)`                       what the server's learning rate is multiplied with
`resumable`                           False where no checkpoint can hold the mode: its workers do several things at once
`estimator`                           the gradient that workers exchange, see `ashl.topology.estimate`
`takes_all`                              that the server takes in all that has come before it answers anyone

A mode of the parameter server that has other messages than updates and models, in the same loops:

`produce(node, stage, state)`         awaited: (work, body, loss) of a worker's next push
`absorb(stage, state, message)`       at the server: what a push does to `state`; whether the model changed
`answer(stage, state, rank)`          the body of the reply to a worker; None = nothing new
`take(stage, state, body)`            at the worker: the model that it goes on with
`unbiased`, `sparse`, `plain`         that it needs an unbiased codec; that its own messages leave a codec nothing to
                                      do; that its steps leave the optimizer nothing but the learning rate to say

and a mode whose loops are its own, like profiling, has `role(stage, rank)`. What a mode of partial all-reduce has
instead of these says `ashl.topology.group_generator`, and a mode of gossip `ashl.topology.gossip`.
"""
