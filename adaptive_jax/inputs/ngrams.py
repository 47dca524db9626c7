"""Vectors of the n-grams that end with each token, added to an input's vectors of words."""

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
    """An input of words, plus tables of the pairs, triples … of words that end with each token
    (N-Grammer, Roy et al. 2022; over-encoding, Huang et al. 2025).

    Each order has its own table. The rows of an n-gram pass a linear map to `features` and are
    added to the vector of the word:

        hashed     one or several rows, which many n-grams share
        counted    a row for each of the `rows` most frequent n-grams of the train split; the rest
                   add nothing
        banded     the same rows in bands like those of an adaptive input, wide for frequent n-grams
                   and narrow for rare ones; the rest are hashed to a last, narrowest band

    Tables start as zeros, so that the model starts like one without n-grams, and maps of rows of
    width w as N(0, 1 / w), so that narrow rows learn as fast as wide ones. An n-gram that would
    reach across the start of a text, the border of a segment or a word that is not in the
    vocabulary adds nothing.

    A tied output shares the table of `words`.

    Attributes:
        words: the input that makes the vectors of words.
        orders: numbers of words of the n-grams: (2, 3) for pairs and triples.
        kind: "hashed", "counted" or "banded".
        rows: rows of the table of each order, without those of `hashed_rows`.
        row_width: width of a row, or of the rows of the first band; 0: `features`.
        row_cutoffs: of banded tables, rank of the first n-gram of every band but the first.
        row_factor: of banded tables, ratio of the widths of one band and the next.
        hashed_rows: of banded tables, rows of the last band, to which n-grams that are not counted
            are hashed; 0: these add nothing.
        hashes: number of hashed rows per n-gram, which are summed: n-grams that share one row
            seldom share all.
        signs: each hash also gives its row a sign, so that n-grams that share a row cancel out on
            average (Weinberger et al. 2009).
        counts: of counted and banded tables, a file of n-grams like the one in a workdir; empty:
            count those of the train split.
        least: the fewest occurrences of a counted n-gram.
        word_axes: axes over which the rows are sharded; the same as those of `words`.

    Raises:
        InputError: orders that are not whole numbers of 2 or more, or repeated; a name or number
            out of range; `row_cutoffs` without banded tables; `words` that reads earlier tokens
            itself; counted n-grams that are missing, or of another vocabulary.
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
        property(operator.attrgetter(f"words.{name}"), doc="Equal to that of `words`.")
        for name in ("vocabulary_size", "features")
    )

    @property
    def dtype(self):
        """The dtype of `words`; float32 if it has none."""
        return getattr(self.words, "dtype", jnp.float32)

    @property
    def cuts_words(self) -> bool:
        """True if devices may share the rows of `words`."""
        return getattr(self.words, "cuts_words", False)

    @property
    def reach(self) -> int:
        """Number of earlier tokens that an n-gram has."""
        return max(self.orders) - 1

    @property
    def lexicon_spec(self) -> dict:
        """Lexicon arrays that the layer reads, see `adaptive_jax.data.vocabulary.lexicon`."""
        spec = {"words": self.words.lexicon_spec} if hasattr(self.words, "lexicon_spec") else {}
        limits = {"orders": self.orders, "rows": self.rows, "least": self.least}
        ngrams = {"ngrams": {"path": self.counts} | limits}
        return spec if self.kind == "hashed" else spec | ngrams

    def lexicon_shapes(self, words: int) -> dict:
        """Shapes and dtypes of the arrays in `lexicon_spec`, for this number of words."""
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
        """The table of one order: rows of counted n-grams, followed by those of hashed ones."""
        hash_rows = self.hashed_rows if self.kind == "banded" else 0
        bands = {"cutoffs": (*self.row_cutoffs, *[self.rows] * bool(hash_rows))}
        bands |= {"factor": self.row_factor, "width": self.row_width, "word_axes": self.word_axes}
        starts = {"table_init": nn.initializers.zeros, "projection_init": LECUN}
        settings = bands | starts | {"dtype": self.dtype}
        # Without a parent, flax binds it where it is assigned.
        return AdaptiveInput(self.rows + hash_rows, self.features, **settings, parent=None)

    def __call__(self, tokens: jax.Array, batch=None, *, train: bool = False, earlier=None):
        """Maps token ids `[rows, time]`, or row numbers of composed vectors, to vectors `[rows,
        time, features]`.

        earlier: int32 `[rows, reach]`, the ids of the tokens before each row, -1 where there is
            none; None: none.
        """
        tokens = whole_numbers("tokens", tokens, "rows", "time")
        vectors = self.words(tokens, batch, train=train)
        segments = None if batch is None else batch.segment_ids
        ngrams = with_earlier(self.word_ids(tokens), earlier, segments, self.reach)
        for order in self.orders:
            vectors += self._vectors(ngrams[..., -order:])
        return vectors

    def _vectors(self, ngrams):
        """Vectors `[rows, time, features]` of n-grams `[rows, time, order]`, 0 where one of their
        tokens is -1.
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
            first_hash = (jnp.arange(self.hashes) == 0).astype(jnp.int32)  # its row, counted once
            signs = jnp.where(ranks < 0, signs, jnp.broadcast_to(first_hash, rows.shape))
            rows = jnp.where(ranks < 0, rows, ranks)
        signs = jnp.where(jnp.all(ngrams >= 0, axis=-1, keepdims=True), signs, 0)
        vectors = self.ngrams[order](jnp.where(signs == 0, 0, rows))
        return jnp.sum(vectors * signs.astype(vectors.dtype)[..., None], axis=-2)

    def word_ids(self, tokens: jax.Array) -> jax.Array:
        """The word ids of `tokens`: themselves or, where `compose` stored tables whose rows they
        number, the ids of these rows; -1 for a row out of range.
        """
        if not self.has_variable("tables", "word_ids"):
            return tokens
        words = self.get_variable("tables", "word_ids").at[jnp.asarray(tokens)]
        return words.get(mode="fill", fill_value=-1, wrap_negative_indices=False)

    def compose(self, words: jax.Array, *, train: bool = False) -> None:
        """Stores the ids of `words [n]` in the collection "tables", and their vectors unless it
        has them. Only for an input of words that composes its vectors.
        """
        if not self.words.has_variable("tables", "vectors"):
            self.words.compose(words, train=train)
        self.put_variable("tables", "word_ids", words)

    def read(self, words: jax.Array) -> None:
        """Calls the method of the input of words."""
        self.words.read(words)

    def bands(self, *, train: bool = False) -> list[Band]:
        """The bands of the input of words."""
        return self.words.bands(train=train)

    def word_tables(self) -> dict[str, list[int]]:
        """The parameters with a row for each word or n-gram, by path, and the number of rows of
        each band in them.
        """
        tables = {"words": getattr(self.words, "word_tables", dict)()}
        tables |= {f"ngrams_{order}": self._table().word_tables() for order in self.orders}
        return {f"{group}/{name}": rows for group in tables for name, rows in tables[group].items()}

    def over_words(self, axes: str | Sequence[str]) -> "NGrams":
        """The layer for one device of `jax.shard_map`, with its share of the rows of words and
        n-grams.
        """
        return self.clone(word_axes=axes, words=self.words.clone(word_axes=axes))


def with_earlier(tokens: jax.Array, earlier, segments, reach: int) -> jax.Array:
    """Token ids `[rows, time]` with the `reach` ids before each, `[rows, time, reach + 1]`, in the
    order of the text; -1 where its segment has no such token.

    earlier: `[rows, reach]`, the tokens before each row; None: none.
    segments: `[rows, time]`; None: each row is one segment, and `earlier` belongs to it.
    """
    tokens = tokens.astype(jnp.int32)  # an unsigned -1 would be a valid id
    time, columns = tokens.shape[1], [tokens]
    if earlier is None:
        earlier = jnp.full((len(tokens), reach), -1)
    earlier = whole_numbers("earlier", earlier, len(tokens), reach).astype(jnp.int32)
    if segments is not None:
        segments = whole_numbers("segment_ids", segments, *tokens.shape)
    row = jnp.concatenate([earlier, tokens], axis=1)
    for lag in range(1, reach + 1):
        column = row[:, reach - lag :][:, :time]
        if segments is not None:
            before = jnp.pad(segments, ((0, 0), (lag, 0)), constant_values=-1)[:, :time]
            column = jnp.where(before == segments, column, -1)
        columns.insert(0, column)
    return jnp.stack(columns, axis=-1)


def ranks_of(ngrams: jax.Array, counted: jax.Array) -> jax.Array:
    """Ranks int32 `[...]` of n-grams `[..., order]` by binary search; -1 for n-grams that are not
    counted.

    counted: `[n-grams, order + 1]`, see `adaptive_jax.data.vocabulary.ngrams.sorted_ngrams`.
    """
    ngrams, counted = ngrams.astype(jnp.int32), jnp.asarray(counted)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        key = counted.at[middle].get(mode="clip")[..., :-1]
        differ = key != ngrams
        difference = jnp.argmax(differ, axis=-1, keepdims=True)  # index of the first difference
        less = jnp.take_along_axis(key < ngrams, difference, axis=-1)[..., 0] & (low < high)
        return jnp.where(less, middle + 1, low), jnp.where(less, high, middle)

    low = jnp.zeros_like(ngrams[..., 0])
    low, _ = lax.fori_loop(0, len(counted).bit_length(), halve, (low, low + len(counted)))
    nearest = counted.at[low].get(mode="clip")
    return jnp.where(jnp.all(nearest[..., :-1] == ngrams, axis=-1), nearest[..., -1], -1)


def hashed(ngrams: jax.Array, hashes: int) -> jax.Array:
    """Hash codes uint32 `[..., hashes]` of n-grams `[..., order]`: each word is mixed in by the
    finalizer of MurmurHash3, from a different seed for each hash.
    """
    codes = jnp.arange(hashes, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    codes = jnp.broadcast_to(codes, (*ngrams.shape[:-1], hashes))
    for word in jnp.moveaxis(ngrams.astype(jnp.uint32), -1, 0):
        codes = codes ^ word[..., None]
        for shift, factor in (16, 0x85EBCA6B), (13, 0xC2B2AE35):
            codes = (codes ^ (codes >> shift)) * jnp.uint32(factor)
        codes ^= codes >> 16
    return codes
