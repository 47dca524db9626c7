"""The language model: input → body → output, three independent choices."""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from adaptive_jax.bodies.gated_conv import GatedConv
from adaptive_jax.bodies.lstm import AWDLSTM, LSTM
from adaptive_jax.bodies.transformer import PostNormTransformer, Transformer
from adaptive_jax.config.classes import make
from adaptive_jax.config.keys import at, word_group
from adaptive_jax.errors import InputError
from adaptive_jax.inputs.adaptive import AdaptiveInput
from adaptive_jax.inputs.char_cnn import CharacterCNN
from adaptive_jax.inputs.groc import GroC
from adaptive_jax.inputs.lookup import Lookup
from adaptive_jax.inputs.ngrams import NGrams
from adaptive_jax.numerics.arrays import ids
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.numerics.layers import word_layer
from adaptive_jax.outputs.computed import AssembledTable, ComposedTable, MappedTable
from adaptive_jax.outputs.differentiated import Differentiated
from adaptive_jax.outputs.sampled import NCE, Sampled
from adaptive_jax.outputs.softmax import FullSoftmax, Hierarchical, Loss, Softmax
from adaptive_jax.outputs.tables import OwnTable, TiedTable

WORDS = {"lookup": Lookup, "adaptive": AdaptiveInput, "char_cnn": CharacterCNN, "groc": GroC}
INPUTS = WORDS | {"ngrams": NGrams}  # NGrams has an input of WORDS as a field
BODIES = {
    "transformer": Transformer,
    "transformer_post_norm": PostNormTransformer,
    "gated_conv": GatedConv,
    "lstm": LSTM,
    "awd_lstm": AWDLSTM,
}


TABLES = {
    "own": OwnTable,
    "tied": TiedTable,
    "mapped": MappedTable,
    "composed": ComposedTable,
    "assembled": AssembledTable,
}
OUTPUTS = {
    "softmax": FullSoftmax,
    "adaptive": Softmax,
    "hierarchical": Hierarchical,
    "sampled": Sampled,
    "nce": NCE,
    "differentiated": Differentiated,
}
METHODS = {
    "body": ("initial_carry",),
    "output": ("bands", "flops", "loss", "nll", "log_probs"),
}


class Remembered(NamedTuple):
    """The carry of a model whose input reads earlier tokens.

    Attributes:
        earlier: int32 `[rows, reach]`, the tokens before the next one; -1 where there is none.
        body: the carry of the body.
    """

    earlier: jax.Array
    body: object


class LanguageModel(nn.Module):
    """A next-word model: an input, a body and an output.

    `apply` takes these collections: "params"; "lexicon", the arrays in `lexicon_spec`; and
    optionally "tables", made by `compose`, so that vectors that are composed from other parameters
    are computed once and not in every call.

    Attributes:
        input: token ids to vectors.
        body: vectors to hidden states.
        output: hidden states to losses.
        shard_words: whether devices that share one copy of the parameters each compute the words
            that they hold, see `over_words`.
    """

    input: nn.Module
    body: nn.Module
    output: nn.Module
    shard_words: bool = False

    def __call__(self, batch: Batch, carry=(), *, train: bool = False) -> tuple[Loss, object]:
        """The loss of a batch, see `Softmax.loss`, and the next carry.

        Raises:
            InputError: arrays of shapes that do not fit, or, outside of `jax.jit`, ids outside of
                the vocabulary.
        """
        hidden, carry = self.hidden(batch, carry, train=train)
        targets, weights, rows = batch.targets, batch.weights, batch.row_ids
        return self.output.loss(hidden, targets, weights, rows, train=train), carry

    def hidden(
        self, batch: Batch, carry=(), *, train: bool = False, in_vocabulary=None
    ) -> tuple[jax.Array, object]:
        """Hidden states `[rows, time, features]`, and the next carry.

        With the carry `()` every row stands alone and `()` is returned.

        in_vocabulary: bool `[rows, time]`; where False, the body reads zeros instead of the input's
            vector. None: all True.
        """
        mask, tokens = in_vocabulary, batch.inputs
        tokens = tokens if mask is None else jnp.where(mask, tokens, jnp.int32(-1))
        arguments, before, body_carry = self._remembered(tokens, carry, batch.reset)
        # An input that reads earlier tokens must know which of them are missing.
        inputs = tokens if self.reach else batch.inputs
        vectors = self.input(inputs, batch, train=train, **arguments)
        vectors = vectors if mask is None else jnp.where(mask[..., None], vectors, 0)
        hidden, after = self.body(vectors, body_carry, batch, train=train)
        return hidden, after if before is None else Remembered(before, after)

    def vectors(self, tokens: jax.Array) -> jax.Array:
        """Input vectors `[rows, time, features]` of tokens `[rows, time]`."""
        return self.input(tokens)

    def initial_carry(self, rows: int) -> object:
        """The carry of new rows; () if the body carries nothing from row to row."""
        carry = self.body.initial_carry(rows)
        carries = jax.tree.structure(carry) != jax.tree.structure(())
        return self._with_earlier(rows, carry) if carries else carry

    def cache(self, rows: int, length: int) -> object:
        """The carry of rows before their first token, for `step`; see the body's `cache`."""
        return self._with_earlier(rows, self.body.cache(rows, length))

    def _with_earlier(self, rows, carry):
        reach = self.reach
        return Remembered(jnp.full((rows, reach), -1, jnp.int32), carry) if reach else carry

    @property
    def reach(self) -> int:
        """Number of earlier tokens that the input reads."""
        return getattr(self.input, "reach", 0)

    def _remembered(self, tokens, carry, reset):
        """Arguments for an input that reads earlier tokens, the next `Remembered.earlier` or None,
        and the body's carry.
        """
        if not self.reach:
            return {}, None, carry
        if not isinstance(carry, Remembered):
            return {"earlier": jnp.full((len(tokens), self.reach), -1)}, None, carry
        earlier = carry.earlier
        if reset is not None:
            earlier = jnp.where(jnp.asarray(reset)[:, None], -1, earlier)
        words = self.input.word_ids(tokens) if hasattr(self.input, "word_ids") else tokens
        after = jnp.concatenate([earlier, jnp.asarray(words, jnp.int32)], axis=1)
        return {"earlier": earlier}, after[:, -self.reach :], carry.body

    def step(self, tokens: jax.Array, carry) -> tuple[jax.Array, object]:
        """Hidden states of tokens `[rows, time]` that continue `carry`, and the next carry;
        `cache` makes the first.
        """
        return self.hidden(Batch(tokens, tokens, None, None), carry)

    def nll(self, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        """See `Softmax.nll`."""
        return self.output.nll(hidden, targets)

    def log_probs(self, batch: Batch, positions: jax.Array) -> jax.Array:
        """Log-probabilities `[rows, n, vocabulary]` of the words after `positions [rows, n]`, which
        are columns of `batch.inputs`.
        """
        hidden, _ = self.hidden(batch)
        positions = ids("positions", positions, hidden.shape[1], len(hidden), "n")
        return self.output.log_probs(jnp.take_along_axis(hidden, positions[..., None], axis=1))

    def compose(self, words: jax.Array, *, train: bool = False) -> None:
        """Stores the vectors of `words [n]` that are computed from other parameters in the
        collection "tables".

        Token ids are then rows of these tables: either `words` are all words in order, or the
        batch's `inputs` are indices into `words`, see `composed_words`. Vectors of the input that
        "tables" already has are not computed again.
        """
        if self.composes_input and not self.input.has_variable("tables", "vectors"):
            self.input.compose(words, train=train)
        # Ask the class: asking the module would set up a tied table with these words only.
        if hasattr(type(self.output.table), "compose"):
            self.output.table.compose(words, train=train)

    def read(self, words: jax.Array, *, train: bool = False) -> None:
        """Stores the surface vectors of `words [n]` in the collection "tables", from which
        `compose` reads those of related and defining words.
        """
        self.input.read(words)

    def composed_words(self) -> str:
        """The words whose vectors `compose` must compute: "none", those of the "inputs", or
        "all".
        """
        table = self.output.table
        tied = getattr(table, "source", None) is self.input
        if hasattr(table, "compose") or (self.composes_input and tied):
            return "all"
        return "inputs" if self.composes_input else "none"

    @property
    def composes_input(self) -> bool:
        """True if the input composes the vectors of words."""
        return hasattr(word_layer(self.input), "compose")

    def word_tables(self) -> dict[tuple[str, ...], list[int]]:
        """The parameters with a row for each word, by path, and the number of words of each band
        in them, in the order of their rows.
        """
        owners = {("input",): self.input, ("output", "table"): self.output.table}
        return {
            (*path, *name.split("/")): words
            for path, layer in owners.items()
            for name, words in getattr(layer, "word_tables", dict)().items()
        }

    def over_words(self, axes: Sequence[str]) -> "LanguageModel":
        """The model for one device of `jax.shard_map`, whose tables have this device's share of the
        words; these are sharded over `axes`, like the rows of the batch. It computes losses and
        nll.
        """
        source, table = self.input, self.output.table
        sharded = getattr(source, "over_words", lambda axes: source.clone(word_axes=axes))(axes)
        tied = getattr(table, "source", None) is source
        table = table.clone(**({"source": sharded} if tied else {"word_axes": axes}))
        return self.clone(input=sharded, output=self.output.clone(table=table))

    def lexicon_spec(self) -> dict:
        """Specification of the arrays that layers need of each word, by layer: the second argument
        of `adaptive_jax.data.vocabulary.lexicon.lexicon`.
        """
        return self._of_lexicon(lambda layer: layer.lexicon_spec)

    def lexicon_shapes(self) -> dict:
        """The shapes and dtypes of the arrays in `lexicon_spec`, in the same tree."""
        return self._of_lexicon(lambda layer: layer.lexicon_shapes(self.input.vocabulary_size))

    def _of_lexicon(self, attribute):
        """Results of `attribute(layer)` for the layers that need a lexicon."""
        source, table, output = (
            attribute(layer) if hasattr(layer, "lexicon_spec") else {}
            for layer in (self.input, self.output.table, self.output)
        )
        tree = {"input": source, "output": ({"table": table} if table else {}) | output}
        return {name: entries for name, entries in tree.items() if entries}


def build(config: Mapping, vocabulary_size: int) -> LanguageModel:
    """Builds the model that a config describes by its groups `input`, `body` and `output`, `dtype`
    and `shard_words`.

    A group's `name` selects the class; its other keys are that class's fields. The output's group
    `table` has a name of `TABLES`, such as "tied" for the table of the input; that of a composed
    table has a group `cnn` with the fields of `CharacterCNN`.

    Raises:
        InputError: a name or a field that does not exist, or values that do not fit together; or
            `output.clusters`, with which the order of the vocabulary must agree, see
            `adaptive_jax.data.vocabulary.clusters.in_clusters`.
    """
    dtype = jnp.dtype(config["dtype"])
    body = make("body", BODIES, config["body"], dtype=dtype)
    words = {"vocabulary_size": vocabulary_size, "features": body.features, "dtype": dtype}
    source_settings = dict(config["input"])
    if isinstance(inner := source_settings.get("words"), Mapping):
        source_settings["words"] = make("input.words", WORDS, inner, **words)
    source = make("input", INPUTS, source_settings, **words)
    settings = dict(config["output"])
    if clusters := settings.pop("clusters", ""):
        raise InputError(
            f"config.output.clusters={clusters!r} is a file, which build does not read: give it the"
            " config and the number of words that data.vocabulary.clusters.in_clusters returns"
        )
    words |= {"features": getattr(body, "output_features", body.features), "source": source}
    table_settings = dict(settings.pop("table"))
    if (cnn := table_settings.pop("cnn", None)) is not None:
        words["cnn"] = make("output.table.cnn", INPUTS, {"name": "char_cnn"} | cnn, **words)
    table = make("output.table", TABLES, table_settings, **words)
    output = make("output", OUTPUTS, settings, table=table)
    check_methods("body", body)
    check_methods("output", output)
    model = LanguageModel(source, body, output, config["shard_words"])
    _check(model, config["output"]["name"])
    if model.shard_words:
        _check_word_tables(model, config)
    return model


def check_methods(group: str, layer: nn.Module) -> None:
    """Checks that a body or an output, which may be from another package, has the methods of its
    group.

    Raises:
        InputError: names all missing methods.
    """
    if missing := [name for name in METHODS[group] if not hasattr(layer, name)]:
        base = ": derive it from adaptive_jax.Output" if group == "output" else ""
        raise InputError(
            f"config.{group}.name must be a class with {', '.join(METHODS[group])}, and"
            f" {type(layer).__name__} has no {', '.join(missing)}{base}"
        )


@functools.lru_cache(maxsize=8)
def variable_shapes(model: LanguageModel) -> dict:
    """Shapes of the collections "params" and "lexicon"; cached dicts, not to be changed."""
    shapes = jax.eval_shape(lambda: init_params(model, 0))
    return {"params": shapes, "lexicon": model.lexicon_shapes()}


@functools.lru_cache(maxsize=8)
def band_shapes(model: LanguageModel) -> list[Band]:
    """Shapes of the bands of the output's table."""
    bands = functools.partial(model.init_with_output, method=lambda m: m.output.bands())
    return jax.eval_shape(lambda: bands(jax.random.key(0))[0])


def parameter_shapes(model: LanguageModel) -> dict:
    """Shapes of the model's parameters."""
    return variable_shapes(model)["params"]


def init_params(model: LanguageModel, seed: int) -> dict:
    """Fresh parameters."""
    ids = jnp.zeros((1, 1), jnp.int32)
    batch = Batch(ids, ids, None, None)
    # Every output makes its parameters in `setup`, so its loss need not be computed.
    visit = lambda model, batch: (model.hidden(batch), model.output.bands())
    return model.init(jax.random.key(seed), batch, method=visit)["params"]


def _check_word_tables(model, config):
    """Raises InputError if a layer does not support tables that are sharded over words."""
    table, settings, words = model.output.table, config["output"], word_group(config)
    for key, layer, name, cures in (
        (words, model.input, at(config, words)["name"], "'adaptive' or 'lookup'"),
        ("output.table", table, settings["table"]["name"], "'own', or 'tied' without cutoffs"),
        ("output", model.output, settings["name"], "'adaptive' or 'softmax'"),
    ):
        if not getattr(layer, "cuts_words", False):
            raise InputError(
                f"config.shard_words=True needs config.{key}.name={cures}, got {name!r}"
            )


def _check(model, output):
    """Raises InputError for layers that do not fit together; `band_shapes` runs the checks of the
    layers themselves.
    """
    if getattr(word_layer(model.input), "scaled", False) and getattr(model.body, "scaled", False):
        raise InputError(
            "config.input.scaled=True and config.body.scaled=True would both multiply vectors by"
            " sqrt(features): use config.input.scaled=False"
        )
    features, sliced = model.output.table.features, getattr(model.output, "reads_slices", False)
    if not sliced and any(band.features != features for band in band_shapes(model)):
        raise InputError(
            "config.output.table.projected=False leaves a band that is not as wide as the hidden"
            f" states, {features}, and config.output.name={output!r} cannot read it: use"
            " config.output.table.projected=True"
        )
