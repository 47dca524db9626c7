"""Models trained with other code."""
