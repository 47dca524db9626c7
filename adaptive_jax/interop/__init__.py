"""Models of other libraries: read fairseq's and AWD-LSTM's, write safetensors and StableHLO."""

from adaptive_jax.errors import of_extra

with of_extra("layers"):
    import flax  # noqa: F401
