"""The language model: input, body and output together."""
