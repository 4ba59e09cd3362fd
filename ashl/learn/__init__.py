"""What a `Compute` runs: gradients, local steps and evaluation on one flat vector."""
