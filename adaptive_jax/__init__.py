"""adaptive_jax: language models with very large vocabularies, in JAX."""

import importlib
from typing import TYPE_CHECKING

# The exports of each module, which is imported when one of them is first used: processes that
# prepare text should not load JAX.
_EXPORTS = {
    "bodies.gated_conv": ("GatedConv",),
    "bodies.lstm": ("AWDLSTM", "LSTM"),
    "bodies.transformer": ("Transformer",),
    "data.vocabulary.frequency": ("count_ids", "frequency_order"),
    "errors": ("InputError",),
    "inputs.adaptive": ("AdaptiveInput",),
    "inputs.char_cnn": ("CharacterCNN",),
    "inputs.groc": ("GroC",),
    "inputs.lookup": ("Lookup",),
    "inputs.ngrams": ("NGrams",),
    "interop.save_run": ("save_run",),
    "losses.cross_entropy": ("adaptive_cross_entropy", "linear_cross_entropy", "linear_log_probs"),
    "losses.distillation": ("linear_distillation",),
    "losses.distribution": ("log_probs",),
    "model.language_model": ("LanguageModel", "build"),
    "numerics.bands": ("Band",),
    "numerics.batch": ("Batch",),
    "optimizers.row_sparse": ("update_rows",),
    "optimizers.row_wise": ("row_wise_adagrad", "row_wise_adam"),
    "outputs.computed": ("AssembledTable", "ComposedTable", "MappedTable"),
    "outputs.differentiated": ("Differentiated",),
    "outputs.output": ("Loss", "Output"),
    "outputs.sampled": ("NCE", "Sampled"),
    "outputs.softmax": ("AdaptiveSoftmax", "Hierarchical", "Softmax"),
    "outputs.tables": ("OwnTable", "TiedTable"),
    "text.load": ("LoadedModel", "load"),
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted(_MODULES)

if TYPE_CHECKING:  # for type checkers, which cannot follow the dict
    from adaptive_jax.bodies.gated_conv import GatedConv as GatedConv
    from adaptive_jax.bodies.lstm import AWDLSTM as AWDLSTM
    from adaptive_jax.bodies.lstm import LSTM as LSTM
    from adaptive_jax.bodies.transformer import Transformer as Transformer
    from adaptive_jax.data.vocabulary.frequency import count_ids as count_ids
    from adaptive_jax.data.vocabulary.frequency import frequency_order as frequency_order
    from adaptive_jax.errors import InputError as InputError
    from adaptive_jax.inputs.adaptive import AdaptiveInput as AdaptiveInput
    from adaptive_jax.inputs.char_cnn import CharacterCNN as CharacterCNN
    from adaptive_jax.inputs.groc import GroC as GroC
    from adaptive_jax.inputs.lookup import Lookup as Lookup
    from adaptive_jax.inputs.ngrams import NGrams as NGrams
    from adaptive_jax.interop.save_run import save_run as save_run
    from adaptive_jax.losses.cross_entropy import adaptive_cross_entropy as adaptive_cross_entropy
    from adaptive_jax.losses.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from adaptive_jax.losses.cross_entropy import linear_log_probs as linear_log_probs
    from adaptive_jax.losses.distillation import linear_distillation as linear_distillation
    from adaptive_jax.losses.distribution import log_probs as log_probs
    from adaptive_jax.model.language_model import LanguageModel as LanguageModel
    from adaptive_jax.model.language_model import build as build
    from adaptive_jax.numerics.bands import Band as Band
    from adaptive_jax.numerics.batch import Batch as Batch
    from adaptive_jax.optimizers.row_sparse import update_rows as update_rows
    from adaptive_jax.optimizers.row_wise import row_wise_adagrad as row_wise_adagrad
    from adaptive_jax.optimizers.row_wise import row_wise_adam as row_wise_adam
    from adaptive_jax.outputs.computed import AssembledTable as AssembledTable
    from adaptive_jax.outputs.computed import ComposedTable as ComposedTable
    from adaptive_jax.outputs.computed import MappedTable as MappedTable
    from adaptive_jax.outputs.differentiated import Differentiated as Differentiated
    from adaptive_jax.outputs.output import Loss as Loss
    from adaptive_jax.outputs.output import Output as Output
    from adaptive_jax.outputs.sampled import NCE as NCE
    from adaptive_jax.outputs.sampled import Sampled as Sampled
    from adaptive_jax.outputs.softmax import AdaptiveSoftmax as AdaptiveSoftmax
    from adaptive_jax.outputs.softmax import Hierarchical as Hierarchical
    from adaptive_jax.outputs.softmax import Softmax as Softmax
    from adaptive_jax.outputs.tables import OwnTable as OwnTable
    from adaptive_jax.outputs.tables import TiedTable as TiedTable
    from adaptive_jax.text.load import LoadedModel as LoadedModel
    from adaptive_jax.text.load import load as load
else:  # a type checker that saw this function would believe that every name exists

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
