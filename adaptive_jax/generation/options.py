"""Options of generation, most of which are flags of the command."""

from typing import Annotated, NamedTuple

from adaptive_jax.config.options import NonNegativeFloat, NonNegativeInt, Option, PositiveInt, check
from adaptive_jax.data.vocabulary.words import UNKNOWN
from adaptive_jax.errors import InputError

COLDEST = 0.01  # smallest positive temperature at which float32 distinguishes words


class Options(NamedTuple):
    """Options of generation.

    Attributes:
        words: words to write at most; `<eos>`, the end of a line, counts as one, and so does each
            token of a tokenizer. A text of sub-words also ends after 20 times as many units.
        lines: stop after this many line ends; 0: no limit.
        temperature: words are drawn in proportion to p^(1 / temperature). 0: always the most
            probable word.
        top_k: draw among the k most probable words; 0: among all.
        top_p: draw among the fewest words, the most probable first, that hold this share of what
            temperature and top_k leave.
        beams: hypotheses of a beam search for the most probable text; 0: draw.
        samples: texts to write; of a beam search, the best ones.
        seed: seed of the draws. Sample i does not depend on the number of samples.
        window: tokens that a transformer sees at most, at least 2; 0: as many as it was
            trained with. See `DecodeState`.
        avoid: words that are never written. `<unk>` is allowed here even if the run has none. For
            a tokenizer, every token that equals the word, with or without a space.
    """

    words: PositiveInt = 100
    lines: NonNegativeInt = 0
    temperature: NonNegativeFloat = 1.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Option(within="(0, 1]")] = 1.0
    beams: NonNegativeInt = 0
    samples: PositiveInt = 1
    seed: Annotated[int, Option(within="[0, 4294967296)")] = 0
    window: NonNegativeInt = 0
    avoid: tuple[str, ...] = (UNKNOWN,)

    def check(self) -> None:
        """Checks the ranges.

        Raises:
            InputError: a number out of range, more samples than beams, or settings of draws for a
                search that draws nothing.
        """
        check(self, prefix="")
        if isinstance(self.avoid, str) or not all(self.avoid):
            raise InputError(
                f"avoid must be a list of words, a comma as '\",\"', got {self.avoid!r}"
            )
        if 0 < self.temperature < COLDEST:
            raise InputError(
                f"temperature must be 0, or in [{COLDEST}, inf), got {self.temperature}"
            )
        unused, cause = (), ""
        if self.beams:
            unused, cause = ("temperature", "top_k", "top_p", "seed"), f"beams={self.beams}"
        elif not self.temperature:
            unused, cause = ("samples", "top_k", "top_p", "seed"), "temperature=0"
        for name in unused:
            value = getattr(self, name)
            if value != self._field_defaults[name]:
                raise InputError(f"{name}={value} has no effect with {cause}: leave one out")
        if self.beams and self.beams < self.samples:
            raise InputError(
                f"samples={self.samples} are more than beams={self.beams}: use more beams or fewer"
                " samples"
            )
