"""Compute on one flat vector: gradients, local steps and evaluations, the work of a `Compute`
effect.
"""
