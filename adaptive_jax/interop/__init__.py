"""Reads models of fairseq and AWD-LSTM, and writes safetensors and StableHLO."""

from adaptive_jax.errors import of_extra

with of_extra("layers"):
    import flax  # noqa: F401
