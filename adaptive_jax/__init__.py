"""adaptive_jax: language models with very large vocabularies, in JAX."""

import importlib
from typing import TYPE_CHECKING

__all__ = [
    "AWDLSTM",
    "LSTM",
    "NCE",
    "AdaptiveInput",
    "AdaptiveSoftmax",
    "AssembledTable",
    "Band",
    "Batch",
    "CharacterCNN",
    "ComposedTable",
    "Differentiated",
    "GatedConv",
    "GroC",
    "Hierarchical",
    "InputError",
    "LanguageModel",
    "LoadedModel",
    "Lookup",
    "Loss",
    "MappedTable",
    "OwnTable",
    "Sampled",
    "Softmax",
    "TiedTable",
    "Transformer",
    "adaptive_cross_entropy",
    "build",
    "linear_cross_entropy",
    "load",
]

if TYPE_CHECKING:
    from adaptive_jax.bands import Band
    from adaptive_jax.batch import Batch
    from adaptive_jax.bodies.gated_conv import GatedConv
    from adaptive_jax.bodies.lstm import AWDLSTM, LSTM
    from adaptive_jax.bodies.transformer import Transformer
    from adaptive_jax.cross_entropy import adaptive_cross_entropy, linear_cross_entropy
    from adaptive_jax.errors import InputError
    from adaptive_jax.inputs.adaptive import AdaptiveInput
    from adaptive_jax.inputs.char_cnn import CharacterCNN
    from adaptive_jax.inputs.groc import GroC
    from adaptive_jax.inputs.lookup import Lookup
    from adaptive_jax.model import LanguageModel, build
    from adaptive_jax.outputs.computed import AssembledTable, ComposedTable, MappedTable
    from adaptive_jax.outputs.differentiated import Differentiated
    from adaptive_jax.outputs.hierarchical import Hierarchical
    from adaptive_jax.outputs.sampled import NCE, Sampled
    from adaptive_jax.outputs.softmax import AdaptiveSoftmax, Loss, Softmax
    from adaptive_jax.outputs.tables import OwnTable, TiedTable
    from adaptive_jax.text.loaded import LoadedModel, load
else:  # a type checker that saw this function would believe that every name exists
    _MODULES = {
        "bands": ("Band",),
        "batch": ("Batch",),
        "bodies.gated_conv": ("GatedConv",),
        "bodies.lstm": ("AWDLSTM", "LSTM"),
        "bodies.transformer": ("Transformer",),
        "cross_entropy": ("adaptive_cross_entropy", "linear_cross_entropy"),
        "errors": ("InputError",),
        "inputs.adaptive": ("AdaptiveInput",),
        "inputs.char_cnn": ("CharacterCNN",),
        "inputs.groc": ("GroC",),
        "inputs.lookup": ("Lookup",),
        "model": ("LanguageModel", "build"),
        "outputs.computed": ("AssembledTable", "ComposedTable", "MappedTable"),
        "outputs.differentiated": ("Differentiated",),
        "outputs.hierarchical": ("Hierarchical",),
        "outputs.sampled": ("NCE", "Sampled"),
        "outputs.softmax": ("AdaptiveSoftmax", "Loss", "Softmax"),
        "outputs.tables": ("OwnTable", "TiedTable"),
        "text.loaded": ("LoadedModel", "load"),
    }

    def __getattr__(name: str) -> object:
        """Imports an export when it is first used: processes that prepare text should not wait
        for JAX or load it.
        """
        for module, names in _MODULES.items():
            if name in names:
                return getattr(importlib.import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
