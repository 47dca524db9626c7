"""The language model: input → body → output, three free choices."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from adaptive_jax.bodies.transformer import PostNormTransformer, Transformer
from adaptive_jax.data.vocabulary.spelling import spell
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError, check_known
from adaptive_jax.inputs.adaptive import AdaptiveInput
from adaptive_jax.inputs.char_cnn import CharacterCNN
from adaptive_jax.inputs.lookup import Lookup
from adaptive_jax.outputs.adaptive import AdaptiveSoftmax
from adaptive_jax.outputs.softmax import Softmax
from adaptive_jax.outputs.tables import OwnTable, TiedTable

INPUTS = {"lookup": Lookup, "adaptive": AdaptiveInput, "char_cnn": CharacterCNN}
BODIES = {"transformer": Transformer, "transformer_post_norm": PostNormTransformer}
TABLES = {"own": OwnTable, "tied": TiedTable}
OUTPUTS = {"softmax": Softmax, "adaptive": AdaptiveSoftmax}


class LanguageModel(nn.Module):
    """Next-word model: input, body and output are three free choices."""

    input: nn.Module
    body: nn.Module
    output: nn.Module

    def __call__(self, tokens, targets, weights, segments=None, *, rows=None, train: bool = False):
        """`(loss, nll [batch, time])` of ids, targets and weights, all `[batch, time]`; see `Softmax.loss` and `hidden`."""
        return self.loss(self.hidden(tokens, segments, rows=rows, train=train), targets, weights, rows, train=train)

    def hidden(self, tokens: jax.Array, segments: jax.Array | None = None, *, rows=None, train: bool = False) -> jax.Array:
        """Hidden states `[batch, time, features]` of token ids `[batch, time]`, every row on its own.

        Segments, int32 `[batch, time]`, part the rows: each run of one number is on its own. Dropout is drawn by the numbers
        of the rows in the update, int32 `[batch]`, by default 0, 1, 2 …
        """
        return self.body(self.input(tokens), train=train, segments=segments, rows=rows)[0]

    def step(self, tokens: jax.Array, carry) -> tuple[jax.Array, object]:
        """Hidden states of tokens that continue `carry`, and the next carry; `body.empty_carry` is the first."""
        return self.body(self.input(tokens), carry)

    def loss(self, hidden: jax.Array, targets: jax.Array, weights: jax.Array, rows=None, *, train: bool = False):
        """See `Softmax.loss`."""
        return self.output.loss(hidden, targets, weights, rows, train=train)

    def nll(self, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        """See `Softmax.nll`."""
        return self.output.nll(hidden, targets)

    def log_probs(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Log-probabilities `[batch, positions, vocabulary]` of the word after each position asked for.

        `positions [batch, asked]` are columns of `tokens [batch, time]`; nothing is built for the others.
        """
        hidden = jnp.take_along_axis(self.hidden(tokens), positions[..., None], axis=1)
        return self.output.log_probs(hidden)


def build(config: Mapping, vocabulary: Vocabulary | int) -> LanguageModel:
    """The model that `config` describes: the groups `input`, `body` and `output`, and `dtype`.

    A group's `name` picks the class, its other keys are that class's fields. The output's group `table` is either
    `{"name": "tied", ...}`, the input's own table, or `{"name": "own", ...}`.

    Args:
        vocabulary: the words; or only their number, which gives a model of the right shapes whose inputs cannot spell.

    Raises:
        InputError: a name or a field that does not exist, or values that do not fit together.
    """
    vocabulary_size = vocabulary if isinstance(vocabulary, int) else len(vocabulary)
    check_known(f"config.dtype={config['dtype']!r}", config["dtype"], ("float32", "bfloat16"))
    dtype = jnp.dtype(config["dtype"])
    features = config["body"]["features"]
    given = {"char_cnn": {"spell": functools.partial(spell, vocabulary)}}.get(config["input"]["name"], {})
    given |= {"vocabulary_size": vocabulary_size, "features": features, "dtype": dtype}
    source = _make("input", INPUTS, config["input"], **given)
    body = _make("body", BODIES, config["body"], dtype=dtype)
    settings = dict(config["output"])
    table = settings.pop("table")
    given = {"tied": {"source": source}, "own": {"vocabulary_size": vocabulary_size}}
    table = _make("output.table", TABLES, table, features=features, **given.get(table["name"], {}))
    output = _make("output", OUTPUTS, settings, table=table)
    model = LanguageModel(source, body, output)
    _check(model, config)
    return model


def _make(group, classes, settings, **given):
    settings = {key: _tuples(value) for key, value in settings.items()}
    name = settings.pop("name")
    check_known(f"config.{group}.name={name!r}", name, classes)
    fields = {
        f.name: f.default is dataclasses.MISSING
        for f in dataclasses.fields(classes[name])
        if f.name not in ("parent", "name", "gather", *given)  # what is gathered is for sharding.py to say
    }
    for key in settings:
        check_known(f"config.{group}.{key}, for {name!r},", key, fields)
    for key, required in fields.items():
        if required and key not in settings:
            raise InputError(f"config.{group}.{key} is missing, and {name!r} has no default for it")
    return classes[name](**given, **settings)


def _tuples(value):
    """Lists as tuples: JSON knows lists only, and a module's fields are to be hashable."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _check(model, config):
    """Runs the layers' own checks, which raise one-line errors, before anything is compiled."""
    bands = jax.eval_shape(
        lambda: model.init_with_output(jax.random.key(0), method=lambda m: m.output.table.bands())[0]
    )
    if config["output"]["name"] == "softmax" and len(bands) > 1:
        raise InputError(
            f"config.output.name='softmax' is built on one band, and its table has {len(bands)}: "
            "use config.output.name='adaptive'"
        )
