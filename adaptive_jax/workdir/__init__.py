"""What a run leaves on disk: config, vocabulary, checkpoints."""
