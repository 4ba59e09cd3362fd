"""One stage of a run: its rules bound together, its counters, its end, and the way of a rank
through all stages.
"""
