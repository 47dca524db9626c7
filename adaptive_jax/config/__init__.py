"""Settings of a run: rows of a paper's table, keys with their defaults, flags that change them."""
