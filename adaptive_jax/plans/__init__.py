"""What a config or a choice of cutoffs costs, counted before anything runs."""
