"""Speed and memory, each against a peer in the same run."""
