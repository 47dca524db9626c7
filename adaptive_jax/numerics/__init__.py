"""Arrays, bands of words, dropout and matrix products: what losses and layers compute with."""
