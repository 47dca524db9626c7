"""Reports on trained runs: figures, tables and a passage coloured by surprisal."""
