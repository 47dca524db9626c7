"""Models trained with fairseq."""
