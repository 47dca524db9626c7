"""adaptive_jax: language models with very large vocabularies, in JAX."""

from adaptive_jax.inputs.adaptive import AdaptiveInput
from adaptive_jax.inputs.lookup import Lookup
from adaptive_jax.model import LanguageModel, build
from adaptive_jax.outputs.adaptive import AdaptiveSoftmax
from adaptive_jax.outputs.softmax import Softmax
from adaptive_jax.outputs.tables import OwnTable, TiedTable

__all__ = ["AdaptiveInput", "AdaptiveSoftmax", "LanguageModel", "Lookup", "OwnTable", "Softmax", "TiedTable", "build"]
