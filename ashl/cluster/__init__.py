"""The machines: how fast each worker computes, how fast each link carries, and when that
changes.
"""
