"""A page about trained runs: figures, tables and a text coloured by surprisal."""
