"""What a config or a choice of cutoffs costs, computed before anything runs."""
