"""Who may go on. A sync mode is a small rule that a topology's loop asks:

`exchange`   what travels: "gradient" (the optimizer steps after averaging) or "difference" (it steps on the worker)
`barrier`    whether pushes are merged together; then what was computed on an older model is late and dropped
`quorum(n)`  how many pushes make a merge
`admit(clock)`  the waiting workers that may go on now
`topologies` the topologies in which the rule makes sense
"""
