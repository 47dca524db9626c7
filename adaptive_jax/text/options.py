"""The options of written text, which are the flags of the command generate."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from adaptive_jax.data.vocabulary.words import UNKNOWN
from adaptive_jax.errors import InputError, check_at_least, check_known

COLDEST = 0.01  # below, numbers of float32 no longer tell words apart


class Options(NamedTuple):
    """How text is written.

    Attributes:
        words: words to write at most; `<eos>`, the end of a line, is one.
        lines: stop after so many ends of lines; 0: do not.
        temperature: words are drawn in proportion to p^(1 / temperature). 0: always the most
            probable word.
        top_k: draw among the k most probable words; 0: among all.
        top_p: draw among the fewest words, the most probable first, that hold this share of what
            temperature and top_k leave.
        beams: hypotheses of a beam search for the most probable text; 0: draw.
        samples: texts to write; of a beam search, the best ones.
        seed: of the draws. Sample i is the same however many samples there are.
        window: tokens that a transformer sees at most; 0: as many as it was trained with. See
            `DecodeState`.
        avoid: words that are never written; `<unk>` may be among them though the run has none.
    """

    words: int = 100
    lines: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    beams: int = 0
    samples: int = 1
    seed: int = 0
    window: int = 0
    avoid: Sequence[str] = (UNKNOWN,)

    @classmethod
    def of(cls, given: Mapping[str, object]) -> "Options":
        """Options by name. Raises InputError for a name that does not exist."""
        for name in given:
            check_known(f"option {name}={given[name]!r}", name, cls._fields)
        return cls(**given)

    def check(self) -> None:
        """Checks the ranges.

        Raises:
            InputError: a number out of range, more samples than beams, or beams with settings of
                draws.
        """
        check_at_least(1, words=self.words, samples=self.samples)
        check_at_least(
            0,
            lines=self.lines,
            top_k=self.top_k,
            beams=self.beams,
            seed=self.seed,
            window=self.window,
        )
        if self.seed >= 1 << 32:
            raise InputError(f"seed={self.seed} must be less than 2^32")
        if not isinstance(self.temperature, numbers.Real) or not (
            self.temperature == 0 or COLDEST <= self.temperature < math.inf
        ):
            raise InputError(
                f"temperature={self.temperature!r} must be 0, for the most probable word, or a"
                f" number from {COLDEST} on"
            )
        if not isinstance(self.top_p, numbers.Real) or not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p!r} must be a share above 0, and at most 1")
        if not self.beams:
            return
        if self.beams < self.samples:
            raise InputError(
                f"samples={self.samples} are more than beams={self.beams}: give more beams or fewer"
                " samples"
            )
        for name in "temperature", "top_k", "top_p", "seed":
            if getattr(self, name) != self._field_defaults[name]:
                raise InputError(
                    f"{name}={getattr(self, name)} is for draws, and beams={self.beams} searches:"
                    " leave one out"
                )
