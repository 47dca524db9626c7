"""Types of this package as a user's checker infers them: tests/test_typing.py runs mypy on this
file, and nothing runs the file.

A line with "type: ignore" is a mistake that mypy must find; if it finds none there, because a name
is Any, it reports that.
"""

from typing import assert_type

import jax

import adaptive_jax
from adaptive_jax import (
    AdaptiveInput,
    AdaptiveSoftmax,
    Band,
    Batch,
    CharacterCNN,
    InputError,
    LanguageModel,
    Lookup,
    Loss,
    OwnTable,
    Softmax,
    TiedTable,
    Transformer,
    build,
    linear_cross_entropy,
)

words = AdaptiveInput(vocabulary_size=100, features=8, cutoffs=(20,))
assert_type(words, AdaptiveInput)
assert_type(words.vocabulary_size, int)
assert_type(words.bands(), list[Band])
assert_type(Lookup(vocabulary_size=100, features=8).bands(), list[Band])
assert_type(TiedTable(words, features=8).bands(), list[Band])
assert_type(OwnTable(100, 8).bands(), list[Band])
print(adaptive_jax.nonesuch)  # type: ignore[attr-defined]
AdaptiveInput(vocabulary_size=100, features=8, cutofs=(20,))  # type: ignore[call-arg]
AdaptiveSoftmax(OwnTable(100, 8), tail_dropout="high")  # type: ignore[arg-type]
assert_type(AdaptiveSoftmax(vocabulary_size=100, features=8, cutoffs=(20,)), AdaptiveSoftmax)
AdaptiveSoftmax(vocabulary_size="many", features=8)  # type: ignore[arg-type]
TiedTable(words, feature=8)  # type: ignore[call-arg]
CharacterCNN(length="long")  # type: ignore[call-arg, arg-type]
Transformer(features=8, layers=1, heads="two", feed_forward=8)  # type: ignore[arg-type]


def score(model: LanguageModel, softmax: Softmax, batch: Batch, hidden: jax.Array) -> Loss:
    """Losses of a model and of an output."""
    assert_type(model(batch)[0], Loss)
    print(batch.words)  # type: ignore[attr-defined]
    linear_cross_entropy(hidden, hidden, hidden, mask=hidden)  # type: ignore[call-arg]
    softmax(hidden, hidden, mask=hidden)  # type: ignore[call-arg]
    assert_type(softmax.predict(hidden), jax.Array)
    return softmax.loss(hidden, hidden, hidden)


try:
    assert_type(build({}, vocabulary_size=100), LanguageModel)
    build({}, vocabulary="100")  # type: ignore[call-arg]
except InputError as error:
    assert_type(error, InputError)
