"""Overlaps: when gradients or local work travel relative to the computation.

A gradient travels as a whole after the backward pass, in buckets during it, or also under the next
forward pass. Local work travels while the next local work is computed. Each overlap is a planner
(`ashl.overlap.contract.Overlap`) that returns buckets; see docs/contributing/overlap.md:

    plan_buckets(timeline) -> the buckets of the model, in backward order

Sums in rank order have the same bits for every partition into messages. So only two kinds of
overlap change the learned model: those with a codec per message, and those that apply work one
exchange late.

Symbols: F is the time of the forward pass and B of the backward pass. Layer group 1 has the first
layers; backward begins with the last group. R_l is the time from the start of backward until the
gradient of group l is ready, and b_l the backward time of group l. q_l is the forward time from the
start of group l to the end. c(s) is the time of a message of s bytes, and c_l that of group l
alone. c_i·Δ_i is the weighted update of worker i; the weights are those of `aggregate`.
"""
