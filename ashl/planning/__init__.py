"""Planning: a composed configuration becomes a checked plan, and a plan's specs become the options
that a run uses.
"""
