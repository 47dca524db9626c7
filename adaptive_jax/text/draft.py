"""Rows of text that a model has read and writes on."""

import time

import jax
import numpy as np

from adaptive_jax.errors import InputError
from adaptive_jax.text.decoding import Choice, Decoder
from adaptive_jax.text.pruned import Best, Drawn

SHORTEST = 2  # tokens of a window: one that is read again, and the next


class Draft:
    """Rows that begin with the same text, and what the model remembers of each.

    A recurrent body, and a convolution, remember without end. A transformer sees the tokens of a
    window. When the window is full, its last half is read again as if the text began there, so that
    positions stay those of training.

    Attributes:
        tokens: all tokens so far, int32 `[rows, n]`.
        steps, opened: how often the next words were asked for, and tails that were computed for it,
            each for all rows.
        seconds: of these steps but the first, which may compile programs.
    """

    def __init__(self, decoder: Decoder, tokens: np.ndarray, rows: int = 1, window: int = 0):
        """Reads the first tokens, int32 `[n]`.

        window: tokens that a transformer sees; 0: as many as it was trained with.

        Raises:
            InputError: a window for a body that has none, or one that is too short.
        """
        self._decoder = decoder
        if window and not decoder.limited:
            body = decoder.run.config["body"]["name"]
            raise InputError(
                f"window={window} means nothing to {body}, which remembers without end: leave"
                " it out"
            )
        if window and window < SHORTEST:
            raise InputError(
                f"window={window} must be {SHORTEST} or more, or 0 for the length of training"
            )
        self._window = window or max(SHORTEST, decoder.run.config["batches"]["sequence_length"])
        self.tokens, self.steps, self.opened = np.asarray(tokens, np.int32)[None], 0, 0
        self._first, self.seconds = 0.0, 0.0
        self._begin()
        if rows > 1:
            self.take(np.zeros(rows, np.int32))

    def draw(self, how: Choice, settings: tuple) -> Drawn:
        """Draws the next word of each row and reads it; see `Decoder.draw`."""
        self._make_room()
        found, self.hidden, self._carry = self._decoder.draw(
            self.hidden, self._carry, how, settings
        )
        self._append(np.asarray(found.id))
        return self._counted(found)

    def best(self, k: int, scores: np.ndarray | None = None, avoided: tuple[int, ...] = ()) -> Best:
        """The k most probable next words; see `Decoder.best`."""
        scores = np.zeros(len(self.tokens), np.float32) if scores is None else scores
        return self._counted(self._decoder.best(self.hidden, k, scores, avoided))

    def read(self, words: np.ndarray) -> None:
        """Reads a token of each row, int32 `[rows]`."""
        self._make_room()
        self.hidden, self._carry = self._decoder.read(words[:, None], self._carry)
        self._append(words)

    def take(self, rows: np.ndarray) -> None:
        """Goes on with some rows, int32, in this order; a row may be taken several times."""
        self.tokens = self.tokens[rows]
        self.hidden, self._carry = self.hidden[rows], self._decoder.take(self._carry, rows)

    def _counted(self, found):
        """The result on the host, its opened tails counted."""
        found = jax.device_get(found)
        self._first = self._first or time.perf_counter()
        self.seconds = time.perf_counter() - self._first
        self.steps, self.opened = self.steps + 1, self.opened + int(found.opened)
        return found

    def _append(self, words):
        self.tokens = np.concatenate([self.tokens, words[:, None]], axis=1)
        self._used += 1

    def _make_room(self):
        if self._decoder.limited and self._used == self._window:
            self._begin()

    def _begin(self):
        """Reads the text, or its end, anew."""
        given = self.tokens
        if self._decoder.limited and given.shape[1] >= self._window:
            given = given[:, -(self._window // 2) :]
        self.hidden, self._carry = self._decoder.read(
            given, self._decoder.cache(len(given), self._window)
        )
        self._used = given.shape[1]
