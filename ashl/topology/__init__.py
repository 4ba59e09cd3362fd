"""Topologies: the mechanism by which models are exchanged, with the loop of each role.

The sync mode decides which workers may proceed.
"""
