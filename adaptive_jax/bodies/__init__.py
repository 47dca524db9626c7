"""Bodies: vectors to hidden states, causally."""
