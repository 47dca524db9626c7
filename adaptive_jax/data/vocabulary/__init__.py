"""Words and sub-words in the order of their ids, and what is known about each."""
