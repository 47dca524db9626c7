"""Words and sub-words, most frequent first, and what is known about each."""
