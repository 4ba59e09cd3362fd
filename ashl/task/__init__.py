"""Tasks: the loss that a model is trained for, and the metric by which it is judged."""
