"""From a composed configuration to a checked plan, and from a plan's specs to the objects that run
it.
"""
