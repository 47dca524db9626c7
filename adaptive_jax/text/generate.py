"""Text that a model writes after a prompt: drawn word by word, or the most probable that a beam
search finds.
"""

import itertools
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from adaptive_jax.data.batches.windows import ALONE
from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN
from adaptive_jax.errors import InputError, check_at_least, check_known
from adaptive_jax.text.beams import Hypothesis, Written, search
from adaptive_jax.text.decoding import Choice, Decoder
from adaptive_jax.text.draft import Draft
from adaptive_jax.text.lines import Lines

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
            `Draft`.
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


class Continuation(NamedTuple):
    """Text after a prompt.

    Attributes:
        text: what follows the prompt, with the space between them.
        tokens: int32 `[n]`.
        log_prob: the sum of the tokens' log-probabilities in nats, by the model, whatever the
            options.
    """

    text: str
    tokens: np.ndarray
    log_prob: float


class Writer:
    """Writes on from a prompt.

    Where examples of training saw nothing before them (break modes "eos" and "complete_doc"), only
    the last example of the prompt is read, and writing stops where it ends.

    Attributes:
        draft: the rows that are written, and how many tails were opened for them.
        words: words written so far, in all texts; of a beam search, those of its results.
    """

    def __init__(self, decoder: Decoder, lines: Lines, prompt: str, options: Options):
        """Reads the prompt.

        Raises:
            InputError: as `Options.check`, `Lines.encode` and `Draft`; an avoided word that the run
                does not know.
        """
        options.check()
        self.words = 0
        self._options, self._lines, self._eos = options, lines, lines.vocabulary.eos
        self._break_mode = decoder.run.config["batches"]["break_mode"]
        known = lines.vocabulary.index
        if missing := [word for word in options.avoid if word not in (*known, UNKNOWN)]:
            raise InputError(
                f"avoid={missing[0]!r} is none of the {len(known):,} words of this run: leave"
                " it out"
            )
        self._avoided = tuple(known[word] for word in options.avoid if word in known)
        tokens = lines.encode(prompt)
        ends = np.flatnonzero(self._ends_example(tokens, np.append(self._eos, tokens[:-1])))
        tokens = tokens[ends[-1] + 1 :] if len(ends) else tokens
        self._line = tokens[np.append(-1, np.flatnonzero(tokens == self._eos))[-1] + 1 :].tolist()
        self._start = Written(0, 0, int(np.append(self._eos, tokens)[-1]))
        self.draft = Draft(
            decoder, np.append(self._eos, tokens), options.beams or options.samples, options.window
        )

    def continuations(self) -> list[Continuation]:
        """The texts that the options ask for: all samples, or the best of a beam search, the
        most probable first.
        """
        if self._options.beams:
            found = search(self.draft, self._avoided, self._start, self._extended)[
                : self._options.samples
            ]
        else:
            found = self._samples()
        self.words = sum(one.written.words for one in found)
        return [
            Continuation(
                "".join(self._pieces(one.tokens)), np.array(one.tokens, np.int32), one.log_prob
            )
            for one in found
        ]

    def stream(self) -> Iterator[str]:
        """The first of these texts in pieces, each as soon as it is known."""
        if self._options.beams:
            yield self.continuations()[0].text
        else:
            yield from self._pieces(self._first_sample())

    def _samples(self):
        texts = [Hypothesis((), 0.0, self._start) for _ in range(self._options.samples)]
        for found in self._draws():
            for row, text in enumerate(texts):
                if not text.written.ended:
                    texts[row] = self._extended(
                        text, int(found.id[row]), text.log_prob + float(found.value[row])
                    )
            if all(text.written.ended for text in texts):
                return texts

    def _first_sample(self):
        written = self._start
        for found in self._draws():
            yield int(found.id[0])
            written = self._after(written, int(found.id[0]))
            self.words = written.words
            if written.ended:
                return

    def _draws(self):
        """Words of all rows, without end."""
        given = self._options
        greedy, key = given.temperature == 0, jax.random.key(given.seed)
        how = Choice(1 if greedy else given.top_k, given.top_p < 1, self._avoided)
        power, top_p = np.float32(1 if greedy else 1 / given.temperature), np.float32(given.top_p)
        for number in itertools.count():
            found = self.draft.draw(how, (key, np.int32(number), power, top_p))
            if not np.isfinite(found.value).all():
                raise InputError(
                    "the model gives no number for the next word: choose another --checkpoint, or"
                    " avoid fewer words"
                )
            yield found

    def _extended(self, text, token, log_prob):
        return Hypothesis((*text.tokens, token), log_prob, self._after(text.written, token))

    def _after(self, written, token):
        """What is written with another token."""
        words, lines = (
            written.words + int(self._lines.vocabulary.ends[token]),
            written.lines + (token == self._eos),
        )
        ended = (
            words >= self._options.words
            or 0 < self._options.lines <= lines
            or self._ends_example(token, written.last)
        )
        return Written(words, lines, token, bool(ended))

    def _ends_example(self, token, before):
        """Whether tokens, each with the one before it, end an example that sees nothing else."""
        ends = token == self._eos
        return (
            ends
            & (self._break_mode in ALONE)
            & ((self._break_mode != "complete_doc") | (before == self._eos))
        )

    def _pieces(self, tokens):
        """The text of tokens after the prompt, word by word.

        A word may change how the line before it is written, such as a quotation mark; then the rest
        of the line comes at its end.
        """
        line, shown = list(self._line), self._lines.decode(self._line)
        for token in tokens:
            line.append(token)
            if not self._lines.vocabulary.ends[token]:
                continue
            text = self._lines.decode(line)
            if text.startswith(shown) or token == self._eos:
                yield text[_shared(text, shown) :]
                shown = text
            if token == self._eos:
                line, shown = [], ""
        if line:
            text = self._lines.decode(line)
            yield text[_shared(text, shown) :]


def _shared(text, other):
    """How many characters two texts have in common at their beginnings."""
    return sum(
        1
        for _ in itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(text, other, strict=False)
        )
    )


def next_words(decoder: Decoder, lines: Lines, text: str, k: int) -> list[tuple[str, float]]:
    """The k most probable words after a text and their probabilities; see
    `LoadedModel.next_words`.
    """
    check_at_least(1, k=k)
    k = min(k, len(lines.vocabulary))
    if isinstance(lines.vocabulary, Subwords):
        found = Writer(
            decoder, lines, text, Options(words=1, beams=2 * k, samples=k, avoid=())
        ).continuations()
        return [
            (lines.decode(one.tokens).replace("\n", EOS), math.exp(one.log_prob)) for one in found
        ]
    best = Writer(decoder, lines, text, Options(avoid=())).draft.best(k)
    pairs = zip(best.ids[0].tolist(), np.exp(best.values[0]).tolist(), strict=True)
    return [(lines.vocabulary.words[word], chance) for word, chance in pairs]
