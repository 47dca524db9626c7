"""Vectors of n-grams, the words that end with each token, added to an input's vectors of words."""

import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from adaptive_jax.errors import InputError, check_at_least, check_known, check_within
from adaptive_jax.inputs.adaptive import AdaptiveInput
from adaptive_jax.numerics.arrays import whole_numbers
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.layers import from_lexicon

LECUN = nn.initializers.lecun_normal()


class NGrams(nn.Module):
    """An input beside which tables have rows for the pairs, triples … of words that end with a
    token (N-Grammer, Roy et al. 2022; over-encoding, Huang et al. 2025).

    Each order has a table of its own. What an n-gram reads there passes a linear map to `features`
    and is added to the vector of the word:

        hashed     one or several rows, which many n-grams share
        counted    a row for each of the `rows` most frequent n-grams of the train split; all
                   others add nothing
        banded     the same rows as an adaptive input, wide for the frequent n-grams and narrow for
                   the rare ones, and a last, narrowest band to which all others are hashed

    Tables start as zeros, so that the model starts as the one of words alone, and maps of rows of
    width w as N(0, 1 / w), so that narrow rows learn as fast as wide ones. An n-gram never
    reaches over the start of a text, over the border of a segment, or over a word that is not in
    the vocabulary: there is then nothing to add.

    An output that shares the input's table shares that of `words`.

    Attributes:
        words: the input that makes the vectors of words.
        orders: words of an n-gram: (2, 3) for pairs and triples.
        kind: "hashed", "counted" or "banded".
        rows: of the table of each order, without those of `hashed_rows`.
        row_width: width of a row, or of those of the first band; 0: `features`.
        row_cutoffs: of banded tables, rank of the first n-gram of every band but the first.
        row_factor: of banded tables, by which each band is narrower than the one before it.
        hashed_rows: of banded tables, rows of the last band, to which n-grams that are not counted
            are hashed; 0: they add nothing.
        hashes: hashed rows of an n-gram, which are added up: n-grams that share one row seldom
            share all.
        signs: each hash also gives a row's sign, so that n-grams that share a row cancel out on
            average (Weinberger et al. 2009).
        counts: of counted and banded tables, the file of n-grams, as runs keep one; empty: those of
            the train split are counted.
        least: occurrences that a counted n-gram has at least.
        word_axes: as those of `words`, over which rows are cut, too.

    Raises:
        InputError: orders that are no whole numbers from 2 on, or listed twice; a name or number
            out of range; cutoffs that no table has; `words` that reads earlier tokens itself;
            counted n-grams that are missing, or of another vocabulary.
    """

    words: nn.Module
    orders: Sequence[int] = (2, 3)
    kind: str = "hashed"
    rows: int = 65_536
    row_width: int = 48
    row_cutoffs: Sequence[int] = ()
    row_factor: int = 4
    hashed_rows: int = 65_536
    hashes: int = 1
    signs: bool = False
    counts: str = ""
    least: int = 2
    word_axes: str | Sequence[str] = ()

    def __post_init__(self):
        super().__post_init__()
        if getattr(self.words, "reach", 0):
            raise InputError(
                f"words must be an input that reads no earlier tokens, got reach={self.words.reach}"
            )
        orders = self.orders if isinstance(self.orders, Sequence) else ()
        if not orders or len({*orders}) < len(orders):
            raise InputError(f"orders must be different whole numbers, got {self.orders!r}")
        for order in orders:
            check_at_least(2, orders=order)
        check_known(f"kind={self.kind!r}", self.kind, ("hashed", "counted", "banded"))
        check_at_least(1, rows=self.rows, hashes=self.hashes)
        check_within("[1, inf)", least=self.least)
        check_at_least(0, row_width=self.row_width, hashed_rows=self.hashed_rows)
        if self.row_cutoffs and self.kind != "banded":
            raise InputError(
                f"row_cutoffs={self.row_cutoffs!r} need kind='banded', got kind={self.kind!r}"
            )
        self._table()  # checks its bands

    vocabulary_size, features = (
        property(operator.attrgetter(f"words.{name}"), doc="That of `words`.")
        for name in ("vocabulary_size", "features")
    )

    @property
    def dtype(self):
        """That of `words`, or float32."""
        return getattr(self.words, "dtype", jnp.float32)

    @property
    def cuts_words(self) -> bool:
        """True if devices may share the rows of `words`."""
        return getattr(self.words, "cuts_words", False)

    @property
    def reach(self) -> int:
        """Earlier tokens that are read."""
        return max(self.orders) - 1

    @property
    def lexicon_spec(self) -> dict:
        """Lexicon arrays that the layer reads, see `adaptive_jax.data.vocabulary.lexicon`."""
        spec = {"words": self.words.lexicon_spec} if hasattr(self.words, "lexicon_spec") else {}
        limits = {"orders": self.orders, "rows": self.rows, "least": self.least}
        ngrams = {"ngrams": {"path": self.counts} | limits}
        return spec if self.kind == "hashed" else spec | ngrams

    def lexicon_shapes(self, words: int) -> dict:
        """Shapes and dtypes of what `lexicon_spec` asks for, of so many words."""
        spec, shapes = self.lexicon_spec, {}
        if "words" in spec:
            shapes["words"] = self.words.lexicon_shapes(words)
        if "ngrams" in spec:
            sizes = {str(order): (self.rows, order + 1) for order in self.orders}
            shapes["ngrams"] = {n: jax.ShapeDtypeStruct(s, jnp.int32) for n, s in sizes.items()}
        return shapes

    def setup(self):
        self.ngrams = {str(order): self._table() for order in self.orders}
        if self.kind != "hashed":
            self.counted = from_lexicon(self, "ngrams", self.vocabulary_size)

    def _table(self):
        """The rows of one order: of counted n-grams, then those of hashed ones."""
        hash_rows = self.hashed_rows if self.kind == "banded" else 0
        bands = {"cutoffs": (*self.row_cutoffs, *[self.rows] * bool(hash_rows))}
        bands |= {"factor": self.row_factor, "width": self.row_width, "word_axes": self.word_axes}
        starts = {"table_init": nn.initializers.zeros, "projection_init": LECUN}
        settings = bands | starts | {"dtype": self.dtype}
        # No parent: it is adopted where it is assigned.
        return AdaptiveInput(self.rows + hash_rows, self.features, **settings, parent=None)

    def __call__(self, tokens: jax.Array, batch=None, *, train: bool = False, earlier=None):
        """Token ids `[rows, time]`, or rows of composed tables, to vectors `[rows, time,
        features]`.

        earlier: int32 `[rows, reach]`, the ids of the tokens before the first ones, -1 where there
            is none; None: none.
        """
        tokens = whole_numbers("tokens", tokens, "rows", "time")
        vectors = self.words(tokens, batch, train=train)
        segments = None if batch is None else batch.segment_ids
        ngrams = with_earlier(self.word_ids(tokens), earlier, segments, self.reach)
        for order in self.orders:
            vectors += self._vectors(ngrams[..., -order:])
        return vectors

    def _vectors(self, ngrams):
        """Vectors `[rows, time, features]` of n-grams `[rows, time, order]`, 0 where a token of
        them is -1.
        """
        order = str(ngrams.shape[-1])
        codes = hashed(ngrams, self.hashes)
        first = 0 if self.kind == "hashed" else self.rows
        hash_rows = {"hashed": self.rows, "counted": 0, "banded": self.hashed_rows}[self.kind]
        rows = first + (codes % jnp.uint32(max(1, hash_rows))).astype(jnp.int32)
        signs = 1 - 2 * (codes >> 31).astype(jnp.int32) if self.signs else jnp.ones_like(rows)
        signs = jnp.where(hash_rows > 0, signs, 0)
        if self.kind != "hashed":
            ranks = ranks_of(ngrams, self.counted[order])[..., None]
            first_hash = (jnp.arange(self.hashes) == 0).astype(jnp.int32)  # a row of its own
            signs = jnp.where(ranks < 0, signs, jnp.broadcast_to(first_hash, rows.shape))
            rows = jnp.where(ranks < 0, rows, ranks)
        signs = jnp.where(jnp.all(ngrams >= 0, axis=-1, keepdims=True), signs, 0)
        vectors = self.ngrams[order](jnp.where(signs == 0, 0, rows))
        return jnp.sum(vectors * signs.astype(vectors.dtype)[..., None], axis=-2)

    def word_ids(self, tokens: jax.Array) -> jax.Array:
        """The ids of words of `tokens`, which are rows of the tables where `compose` made some; -1
        for a row that does not exist.
        """
        if not self.has_variable("tables", "word_ids"):
            return tokens
        words = self.get_variable("tables", "word_ids").at[tokens]
        return words.get(mode="fill", fill_value=-1, wrap_negative_indices=False)

    def compose(self, words: jax.Array, *, train: bool = False) -> None:
        """Stores the vectors of `words [n]`, unless they are there, and their ids in the collection
        "tables"; for an input of `words` that composes them.
        """
        if not self.words.has_variable("tables", "vectors"):
            self.words.compose(words, train=train)
        self.put_variable("tables", "word_ids", words)

    def read(self, words: jax.Array) -> None:
        """Stores what the input of `words` reads of them, see its method."""
        self.words.read(words)

    def bands(self, *, train: bool = False) -> list[Band]:
        """The bands of words, without n-grams."""
        return self.words.bands(train=train)

    def word_tables(self) -> dict[str, list[int]]:
        """The parameters with a row for each word or n-gram, by their paths, and the rows of the
        bands in each.
        """
        tables = {"words": getattr(self.words, "word_tables", dict)()}
        tables |= {f"ngrams_{order}": self._table().word_tables() for order in self.orders}
        return {f"{group}/{name}": rows for group in tables for name, rows in tables[group].items()}

    def over_words(self, axes: str | Sequence[str]) -> "NGrams":
        """The layer for one device of `jax.shard_map` that has its rows of words and n-grams."""
        return self.clone(word_axes=axes, words=self.words.clone(word_axes=axes))


def with_earlier(tokens: jax.Array, earlier, segments, reach: int) -> jax.Array:
    """Token ids `[rows, time]` as `[rows, time, reach + 1]`, each behind the `reach` tokens before
    it: -1 where there is none in its segment.

    earlier: `[rows, reach]`, the tokens before the first ones; None: none.
    segments: `[rows, time]`; None: each row is one, which `earlier` begins.
    """
    tokens = tokens.astype(jnp.int32)  # an unsigned -1 would be an id
    time, columns = tokens.shape[1], [tokens]
    if earlier is None:
        earlier = jnp.full((len(tokens), reach), -1)
    earlier = whole_numbers("earlier", earlier, len(tokens), reach).astype(jnp.int32)
    row = jnp.concatenate([earlier, tokens], axis=1)
    for lag in range(1, reach + 1):
        column = row[:, reach - lag :][:, :time]
        if segments is not None:
            before = jnp.pad(segments, ((0, 0), (lag, 0)), constant_values=-1)[:, :time]
            column = jnp.where(before == segments, column, -1)
        columns.insert(0, column)
    return jnp.stack(columns, axis=-1)


def ranks_of(ngrams: jax.Array, counted: jax.Array) -> jax.Array:
    """Ranks int32 `[...]` of n-grams `[..., order]`, -1 for others, by a binary search.

    counted: `[n-grams, order + 1]`, see `adaptive_jax.data.vocabulary.ngrams.sorted_ngrams`.
    """
    ngrams, counted = ngrams.astype(jnp.int32), jnp.asarray(counted)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        key = counted.at[middle].get(mode="clip")[..., :-1]
        differ = key != ngrams
        difference = jnp.argmax(differ, axis=-1, keepdims=True)  # where the first of them differ
        less = jnp.take_along_axis(key < ngrams, difference, axis=-1)[..., 0] & (low < high)
        return jnp.where(less, middle + 1, low), jnp.where(less, high, middle)

    low = jnp.zeros_like(ngrams[..., 0])
    low, _ = lax.fori_loop(0, len(counted).bit_length(), halve, (low, low + len(counted)))
    nearest = counted.at[low].get(mode="clip")
    return jnp.where(jnp.all(nearest[..., :-1] == ngrams, axis=-1), nearest[..., -1], -1)


def hashed(ngrams: jax.Array, hashes: int) -> jax.Array:
    """Codes uint32 `[..., hashes]` of n-grams `[..., order]`: each word is mixed in by the end of
    MurmurHash3, from a start of each hash's own.
    """
    codes = jnp.arange(hashes, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    codes = jnp.broadcast_to(codes, (*ngrams.shape[:-1], hashes))
    for word in jnp.moveaxis(ngrams.astype(jnp.uint32), -1, 0):
        codes = codes ^ word[..., None]
        for shift, factor in (16, 0x85EBCA6B), (13, 0xC2B2AE35):
            codes = (codes ^ (codes >> shift)) * jnp.uint32(factor)
        codes ^= codes >> 16
    return codes
