"""Training: the loop, one update, optimizers, metrics."""
