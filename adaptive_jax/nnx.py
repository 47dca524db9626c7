"""Layers for `flax.nnx`: the linen layers in flax's bridge, with the same numbers, fields and
methods.

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = AdaptiveInput(267_735, 256, (20_000, 60_000), rngs=rngs)
            self.softmax = AdaptiveSoftmax(source=self.embed, rngs=rngs)

        def __call__(self, tokens, targets):
            return self.softmax(self.embed(tokens), targets)

Parameters are `nnx.Param` with the names of the linen layer, made without a sample input. The key
of dropout is passed to the call: `softmax(hidden, targets, train=True,
rngs=nnx.Rngs(dropout=key))`.
"""

from collections.abc import Mapping, Sequence

import jax

from adaptive_jax.errors import InputError, of_extra
from adaptive_jax.inputs import adaptive
from adaptive_jax.outputs import softmax
from adaptive_jax.outputs.tables import TiedTable

with of_extra("layers"):
    from flax import linen, nnx, traverse_util


def give_lexicon(layer: nnx.bridge.ToNNX, lexicon: Mapping) -> None:
    """Gives a layer in flax's bridge its lexicon. Call it before a softmax shares the layer's
    parameters.

    lexicon: the result of `adaptive_jax.data.vocabulary.lexicon.lexicon` for the `lexicon_spec` of
        the linen layer.
    """
    # Flax's variable class for this collection: not `nnx.Param`, so it is not trained.
    kind = nnx.variable_type_from_name("lexicon", allow_register=True)
    arrays = traverse_util.flatten_dict(jax.tree.map(kind, dict(lexicon)))
    # Parameters of an inner layer may have the same name, such as those of the words of `NGrams`.
    params = {name: getattr(layer, name) for name in lexicon if hasattr(layer, name)}
    merged = traverse_util.unflatten_dict(traverse_util.flatten_dict(params) | arrays)
    for name, variables in merged.items():
        setattr(layer, name, variables)


class AdaptiveInput(nnx.bridge.ToNNX):
    """`adaptive_jax.AdaptiveInput` as an nnx module."""

    def __init__(
        self,
        vocabulary_size: int,
        features: int,
        cutoffs: Sequence[int] = (),
        *,
        rngs: nnx.Rngs,
        **fields,
    ):
        """Args: `rngs`, and the fields of the linen layer.

        Raises:
            InputError: as the linen layer.
        """
        super().__init__(adaptive.AdaptiveInput(vocabulary_size, features, cutoffs, **fields))
        self.lazy_init(method="bands", rngs=rngs)


class AdaptiveSoftmax(nnx.bridge.ToNNX):
    """`adaptive_jax.AdaptiveSoftmax` as an nnx module, on its own table or on that of an input.

    Its methods are those of the linen layer: a call returns the loss; `loss`, `nll`, `log_probs`,
    `predict`, `bands`.
    """

    def __init__(
        self,
        table: linen.Module | None = None,
        *,
        source: nnx.bridge.ToNNX | None = None,
        rngs: nnx.Rngs,
        **fields,
    ):
        """Args:
            table: a linen table, such as `OwnTable(...)`; None: a table of the sizes in `fields`,
                or `TiedTable(source.to_nnx__module)`.
            source: the input whose parameters are shared, as the same `nnx.Param`; a `table` must
                have `source.to_nnx__module` as its source.
            rngs: for the parameters.
            fields: fields of the linen layer.

        Raises:
            InputError: as the linen layer; a source that is not an input of this package; or a
                table that has another source, or one that is tied without `source`.
        """
        if source is None and hasattr(table, "source"):
            kind = type(table).__name__
            raise InputError(f"a {kind} needs source=..., the nnx module whose table it shares")
        if source is None:
            super().__init__(softmax.AdaptiveSoftmax(table, **fields))
            self.lazy_init(method="bands", rngs=rngs)
            return
        linen_source = getattr(source, "to_nnx__module", None)
        if linen_source is None:
            raise InputError(
                f"source={type(source).__name__} must be an input of this package as an nnx module,"
                " such as adaptive_jax.nnx.AdaptiveInput"
            )
        table = TiedTable(linen_source) if table is None else table
        if getattr(table, "source", None) != linen_source:
            raise InputError(
                f"table={type(table).__name__} must have the same source: use"
                " TiedTable(source.to_nnx__module, ...)"
            )
        super().__init__(softmax.AdaptiveSoftmax(table, **fields))
        of_bridge = "to_nnx__", "_pytree__"  # prefixes of attributes that are not variables
        shared = {n: value for n, value in vars(source).items() if not n.startswith(of_bridge)}
        self.table = {"source": shared}
        self(method="bands", mutable=["params"], rngs=rngs)  # makes the other parameters
        self.table = self.table | {"source": shared}
