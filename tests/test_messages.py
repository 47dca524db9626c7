"""The wording of the 30 messages that users meet most, as tests/fixtures/messages.txt has them.

Other tests assert the names in a message alone. `python -m tests.test_messages` writes the file
again: read what has changed.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from flax import linen as nn

import adaptive_jax
from adaptive_jax.bodies.transformer import Transformer
from adaptive_jax.config.keys import complete
from adaptive_jax.data.batches.windows import Windows, windows
from adaptive_jax.data.corpora import load as corpora
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.model.language_model import build
from adaptive_jax.numerics.bands import band_sizes, band_widths
from adaptive_jax.parallel import sharding

FILE = Path(__file__).parent / "fixtures" / "messages.txt"
HIDDEN, TABLE, TARGETS = np.ones((3, 4), "f"), np.ones((7, 4), "f"), np.zeros(3, np.int32)
WORDS = Vocabulary(("the", "cat"), np.array([2, 1]))
IDS = np.arange(9, dtype=np.int32)


def loss(hidden=HIDDEN, table=TABLE, targets=TARGETS, **options):
    return adaptive_jax.linear_cross_entropy(hidden, table, targets, **options)


def adaptive(bands):
    return adaptive_jax.adaptive_cross_entropy(HIDDEN, bands, None, TARGETS)


def data(**settings):
    return corpora.load({"corpus": "text_files", "path": "/nowhere"} | settings)


def table(**settings):
    return build(complete({"output.name": "adaptive", "output.table.name": "own"} | settings), 50)


CALLS = {
    "a target that does not exist": lambda: loss(targets=TARGETS + 7),
    "a transposed table": lambda: loss(table=TABLE.T),
    "a quantized table": lambda: loss(table=TABLE.astype(np.int8)),
    "targets of another shape": lambda: loss(targets=TARGETS[:2]),
    "weights of another shape": lambda: loss(weights=np.ones(2)),
    "a bias of another length": lambda: loss(bias=np.ones(6)),
    "an unknown reduction": lambda: loss(reduction="avg"),
    "an unknown report": lambda: loss(reports=["accuracy"]),
    "a report without its number": lambda: loss(reports=["top_k"]),
    "too much smoothing": lambda: loss(label_smoothing=1.0),
    "a cap of nothing": lambda: loss(soft_cap=0),
    "an axis that is none": lambda: loss(axis_name="model"),
    "a second derivative": lambda: jax.eval_shape(jax.hessian(loss), HIDDEN),
    "bands that are none": lambda: adaptive_jax.adaptive_cross_entropy(
        HIDDEN, TABLE, None, TARGETS
    ),
    "a cutoff beyond the vocabulary": lambda: band_sizes(5_000, (20, 60_000)),
    "cutoffs that fall": lambda: band_sizes(100, (60, 20)),
    "bands without width": lambda: band_widths(16, 4, 4),
    "ids that no word has": lambda: adaptive_jax.AdaptiveInput(50, 8).init(
        jax.random.key(0), np.full(2, 50)
    ),
    "a rate that is none": lambda: adaptive_jax.AdaptiveInput(50, 8, word_dropout=1.5),
    "heads that do not divide": lambda: Transformer(features=8, heads=3),
    "a class for a layer": lambda: adaptive_jax.TiedTable(nn.Embed),
    "a key of a config": lambda: complete({"body.layrs": 3}),
    "a name of a config": lambda: complete({"body.name": "transfomer"}),
    "cutoffs of a config": lambda: table(**{"output.table.cutoffs": (60, 20)}),
    "text that is not there": data,
    "a key of a corpus": lambda: data(treshold=2),
    "a corpus by name": lambda: corpora.load({"corpus": "wikitext"}),
    "a word that is unknown": lambda: WORDS.encode("the dog"),
    "a context beyond the window": lambda: windows(IDS, 0, Windows(4, 4, "none", "packed", 1)),
    "a grid that does not divide": lambda: sharding.device_mesh(3),
}


def messages():
    """The file's content: of each call its name, and its message."""
    lines = []
    for name, call in CALLS.items():
        try:
            call()
        except InputError as error:
            lines.append(f"{name}: {error}\n")
        else:
            lines.append(f"{name}: none\n")
    return "".join(lines)


def test_the_messages_that_users_meet_most():
    """A message that is reworded without being read again says half of what helps."""
    assert len(CALLS) == 30
    assert messages().splitlines() == FILE.read_text().splitlines()


if __name__ == "__main__":
    sys.exit(FILE.write_text(messages()) and None)
