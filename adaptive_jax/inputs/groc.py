"""Grounded compositional word vectors (GroC): from a word's spelling, its relations to other
words and its definition.
"""

import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from adaptive_jax.errors import check_at_least, check_known, check_within
from adaptive_jax.inputs.char_cnn import CharacterCNN
from adaptive_jax.inputs.letters import Chunks
from adaptive_jax.numerics.arrays import exists, ids, look_up, nan_if_missing
from adaptive_jax.numerics.layers import from_lexicon, uniform
from adaptive_jax.numerics.meshes import axes_of, pvary, vary_alike
from adaptive_jax.numerics.products import added, product, sum_dtype


class GroC(CharacterCNN):
    """Word vectors whose parameters do not depend on the vocabulary (Pappas, Mulcaire & Smith 2020,
    section 3.1).

        surface      a character CNN and highway layers over the letters of the word
        relation     the mean of the surface vectors of its related words in a lexicon: synonyms and
                     hyponyms
        definition   the mean of the surface vectors of the words of its definition
        vector       a linear map of the three, concatenated

    Relation and definition are 0 for a word that is not in the lexicon, and where none of their
    words is in the vocabulary. The mean is over the words in the vocabulary; the public code always
    divides by `relations` or `definition`.

    The spelling, relations and definitions of words are the collection "lexicon", see
    `adaptive_jax.data.vocabulary.lexicon`.

    Cost: each distinct word that is needed, for itself or for others, is read once, see
    `adaptive_jax.inputs.letters`. Where the collection "tables" holds vectors that `compose` made,
    they are looked up instead.

    Attributes:
        vocabulary_size: number of words.
        features: width of the vectors that `__call__` returns, and of surface, relation and
            definition.
        lexicon: path of the lexicon: a WordNet directory, or a .jsonl file of relations and
            definitions; see docs/words.md.
        relations: the most related words of a word; 0: no relations.
        definition: the most words of a definition; 0: no definitions.
        form: "paper": WordNet gives synonyms, hyponyms and the definition of the first sense, and
            means are over the words in the vocabulary. "code", as in the public code: synonyms and
            the definition, and means divide by `relations` or `definition`. See docs/words.md.
        share: share of the vocabulary's words that may have relations, and of those that may have a
            definition (the paper's Table 4).
        combine: "concat", the linear map of the paper, or "add", the sum of the three, the default
            of the public code.
        width: width of a letter's vector.
        filters: for each filter, its span in letters and the number of its features: `((1, 32), (2,
            32), ...)`.
        strides: stride of each filter, in letters; empty: 1.
        activation: of filters and highway layers: relu, selu, tanh or sigmoid.
        letters: "elmo" or "bytes", as in `CharacterCNN`.
        highway_layers: number of highway layers.
        length: the most letters of a word that are read, including the marks of its beginning and
            end; at least the span of the longest filter.
        init_range: filters start uniform between -init_range and init_range; so do highway layers
            and projection with the letters "elmo". The rest starts as in torch.
        dtype: dtype of the matrix products; parameters are float32.

    Raises:
        InputError: filters that are not pairs of positive integers; strides of another number than
            filters; a length shorter than the longest filter; a number or name out of range; a
            dtype that is not a float; no lexicon, or that of another vocabulary; token ids outside
            of the vocabulary. Inside `jax.jit`, where values are unknown, the vectors of such ids
            are NaN.
    """

    width: int = 16
    filters: Sequence[Sequence[int]] = ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512))
    highway_layers: int = 1
    length: int = 20
    strides: Sequence[int] = (1, 1, 2, 3, 4, 5)
    activation: str = "selu"
    letters: str = "elmo"
    lexicon: str = ""
    relations: int = 3
    definition: int = 10
    form: str = "paper"
    share: float = 1.0
    combine: str = "concat"
    init_range: float = 0.05

    # Large, as every chunk adds to the gradients of the highway layers, which are large.
    on_cpu: ClassVar[Chunks] = Chunks(1024, short=(8, 12))
    on_accelerators: ClassVar[Chunks] = Chunks(8192, short=())  # the convolutions are little work

    def __post_init__(self):
        super().__post_init__()
        check_at_least(0, relations=self.relations, definition=self.definition)
        check_within("(0, inf)", init_range=self.init_range)
        check_within("[0, 1]", share=self.share)
        check_known(f"combine={self.combine!r}", self.combine, ("concat", "add"))
        check_known(f"form={self.form!r}", self.form, ("paper", "code"))

    def _parts(self):
        """The parts that come from the lexicon, with the most words of each."""
        limits = {"relations": self.relations, "definitions": self.definition}
        return {name: words for name, words in limits.items() if words}

    @property
    def lexicon_spec(self) -> dict:
        """Lexicon arrays that the layer reads, see `adaptive_jax.data.vocabulary.lexicon`."""
        lexicon = {"path": self.lexicon, "form": self.form, "share": self.share}
        parts = {name: lexicon | {"most": most} for name, most in self._parts().items()}
        return super().lexicon_spec | parts

    def lexicon_shapes(self, words: int) -> dict:
        """Shapes and dtypes of the arrays in `lexicon_spec`, for this number of words."""
        parts = {
            name: {"words": jax.ShapeDtypeStruct((words, most), jnp.int32)}
            for name, most in self._parts().items()
        }
        return super().lexicon_shapes(words) | parts

    def setup(self):
        self.word_lists = {
            name: from_lexicon(self, name, self.vocabulary_size)["words"] for name in self._parts()
        }
        super().setup()
        if self.combine == "concat" and self.word_lists:
            width = (1 + len(self.word_lists)) * self.features
            init = uniform(width**-0.5)
            self.map = (
                self.param("map", init, (width, self.features), jnp.float32),
                self.param("map_bias", init, (self.features,), jnp.float32),
            )

    def _start(self, fan_in):
        return uniform(self.init_range)

    def read(self, words: jax.Array) -> None:
        """Stores the surface vectors of `words [n]`, float32 `[n, features]`, in the collection
        "tables". If it has those of all words, `compose` computes none.
        """
        words = ids("words", words, self.vocabulary_size, "words")
        self.put_variable("tables", "surfaces", self._surfaces(words).astype(jnp.float32))

    def _surfaces(self, words):
        return super()._encode(words).astype(sum_dtype(self.dtype))

    def _encode(self, words):
        word_lists = map(jnp.asarray, self.word_lists.values())
        lists = [word_list.at[words].get(mode="fill", fill_value=-1) for word_list in word_lists]
        if self.has_variable("tables", "surfaces"):
            surfaces = self.get_variable("tables", "surfaces")
        elif len(words) >= self.vocabulary_size:
            surfaces = self._surfaces(jnp.arange(self.vocabulary_size))
        else:
            # Surfaces of the words, followed by those of the words in their lists; `lists` become
            # indices into these.
            every = [words, *(jnp.maximum(of_words, 0).ravel() for of_words in lists)]
            surfaces = self._surfaces(jnp.concatenate(every))
            start = len(words)
            for i, of_words in enumerate(lists):
                places = start + jnp.arange(of_words.size).reshape(of_words.shape)
                lists[i] = jnp.where(of_words < 0, -1, places)
                start += of_words.size
            valid = exists(words, self.vocabulary_size)
            words = jnp.where(valid, jnp.arange(len(words)), len(surfaces))
        parts = [look_up(surfaces, words, missing=0)]
        for places in lists:
            count = places.shape[1]
            if self.form == "paper":
                count = jnp.sum(places >= 0, axis=1, keepdims=True)
            count = jnp.maximum(count, 1).astype(surfaces.dtype)
            parts.append(sum_of_rows(surfaces, places) / count)
        if self.combine == "concat" and lists:
            kernel, bias = self.map
            joined = jnp.concatenate(parts, axis=1).astype(self.dtype)
            vectors = added(product(joined, kernel), bias)
        else:
            vectors = sum(parts).astype(self.dtype)
        return nan_if_missing(vectors, words, len(surfaces))


def sum_of_rows(table: jax.Array, places: jax.Array) -> jax.Array:
    """Sums `[n, width]` of rows `places [n, most]` of a table `[rows, width]`; places out of range
    add nothing.

    Forward and backward pass visit one column of places at a time, so that no array of size `[n,
    most, width]` exists.
    """
    return _sum_of_rows(*vary_alike((table, places)))


@jax.custom_vjp
def _sum_of_rows(table, places):
    rows = (
        table.at[column].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        for column in places.T
    )
    return functools.reduce(jnp.add, rows)


def _sum_backward(residuals, gradient):
    table, places = residuals
    gradient = gradient.astype(sum_dtype(gradient.dtype))

    def add(total, places):
        return total.at[places].add(gradient, mode="drop", wrap_negative_indices=False), None

    zeros = pvary(jnp.zeros(table.shape, gradient.dtype), axes_of(places))
    total, _ = jax.lax.scan(add, zeros, places.T)
    return total.astype(table.dtype), None


_sum_of_rows.defvjp(
    lambda table, places: (_sum_of_rows(table, places), (table, places)), _sum_backward
)
