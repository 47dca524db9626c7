"""Text after a prompt: drawn word by word, or the most probable text that a beam search finds."""

import itertools
import math
from collections.abc import Iterator, Sequence
from os.path import commonprefix
from typing import NamedTuple

import jax
import numpy as np

from adaptive_jax.data.batches.windows import ends_example, last_example
from adaptive_jax.data.vocabulary.lines import Lines
from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN
from adaptive_jax.errors import InputError, check_at_least
from adaptive_jax.generation.decoding import Decoder, Draw, Sampling
from adaptive_jax.generation.next_token import TopK, draw_among
from adaptive_jax.generation.options import Options

NOT_FINITE = (
    "no next word has a finite log-probability: choose another --checkpoint, or avoid fewer words"
)
# Words of WikiText that join those beside them, as in "1 @,@ 500"
NUMBER_MARKS = "@,@", "@.@", "@-@"
INCOMPLETE = *NUMBER_MARKS, "\ufffd"  # the last one: bytes of a character

MOST_UNITS = 20  # sub-words per requested word after which a text ends
SPELLINGS = 16  # spellings of an unfinished word that are followed at once
FIRST = 0xFFFFFFFF  # number of the draw that chooses a text's beginning
SHORTEST = 2  # tokens of the smallest window: one that is read again, and the next one


class Continuation(NamedTuple):
    """Text after a prompt.

    Attributes:
        text: the text after the prompt, including the space between them unless the prompt ends
            in one.
        tokens: int32 `[n]`.
        log_prob: sum of the tokens' log-probabilities in nats, by the model itself, whatever the
            options. If the prompt ends within a word of sub-words, the tokens begin with the last
            units of the prompt, and the log-probability is conditional on spelling the prompt.
    """

    text: str
    tokens: np.ndarray
    log_prob: float


class Totals(NamedTuple):
    """Totals of growing texts, `[rows]` each; those of complete texts no longer change.

    Attributes:
        log_probs: float64, sums of the tokens' log-probabilities in nats.
        lengths, num_words, num_lines: number of tokens, words and line ends.
        ended: whether the text is complete.
    """

    log_probs: np.ndarray
    lengths: np.ndarray
    num_words: np.ndarray
    num_lines: np.ndarray
    ended: np.ndarray


class ScoredTokens(NamedTuple):
    """Tokens after a prompt.

    Attributes:
        tokens: int32 `[n]`.
        log_prob: the sum of their log-probabilities in nats.
        unwritten: number of leading tokens that spell only letters of the prompt.
    """

    tokens: np.ndarray
    log_prob: float
    unwritten: int = 0


NO_TOKENS = ScoredTokens(np.zeros(0, np.int32), 0.0)


class DecodeState:
    """Texts that continue one prompt, one per row, with the body's cache.

    The cache of a recurrent body or a convolution has no limit. A transformer sees the tokens of a
    window. When the window is full, its last half is read again before the next token is
    predicted, as if the text began there, so that positions stay those of training.

    Attributes:
        tokens: `<eos>`, the prompt and the texts so far, int32 `[rows, n]`.
        totals: totals of each row.
        line_end: id of `<eos>`; -1 if no id ends a document.
        vocabulary: vocabulary of the run.
    """

    def __init__(self, decoder: Decoder, prompt: np.ndarray, options: Options, rows: int = 1):
        """Reads the prompt, int32 `[n]`.

        Raises:
            InputError: a window for a body without one.
        """
        config, window = decoder.run.config, options.window
        if window and not decoder.limited:
            raise InputError(
                f"window={window} does not apply to {config['body']['name']}, which remembers"
                " without end: leave it out"
            )
        self._window = max(SHORTEST, window or config["batches"]["sequence_length"])
        self._decoder, self._options = decoder, options
        self.vocabulary = decoder.run.vocabulary
        self.line_end = self.vocabulary.index.get(EOS, -1)
        self._break_mode = config["batches"]["break_mode"]
        prompt = last_example(prompt, self.vocabulary.eos, self._break_mode)
        self.tokens = np.append(np.int32(self.vocabulary.eos), prompt)[None]
        self._begin = self.tokens.shape[1]
        self.totals = Totals(np.zeros(1), *np.zeros((3, 1), int), np.zeros(1, bool))
        self._fixed: list[tuple[int, ...]] = [()]
        self._unwritten = np.zeros(1, int)
        self._read_window()
        if rows > 1:
            self.take(np.zeros(rows, np.int32))

    def text_of(self, row: int) -> np.ndarray:
        """The tokens of a row after the prompt, int32 `[n]`."""
        return self.tokens[row, self._begin : self._begin + self.totals.lengths[row]]

    @property
    def line(self) -> list[int]:
        """The tokens of the prompt's last line, which the texts continue."""
        prompt = self.tokens[0, 1 : self._begin]
        return prompt[np.append(-1, np.flatnonzero(prompt == self.line_end))[-1] + 1 :].tolist()

    def begin(self, texts: Sequence[ScoredTokens]) -> None:
        """Sets the beginning of each row's text and its log-probability; further rows get -inf."""
        rows, used = len(self.tokens), len(texts)
        self._fixed = [tuple(text.tokens) for text in texts] + [()] * (rows - used)
        self._unwritten, sums = np.zeros(rows, int), np.full(rows, -np.inf)
        self._unwritten[:used] = [text.unwritten for text in texts]
        sums[:used] = [text.log_prob for text in texts]
        self.totals = self.totals._replace(log_probs=sums)

    def log_probs(self) -> np.ndarray:
        """Log-probabilities of all next tokens, float32 `[rows, V]`."""
        self._make_room()
        return jax.device_get(self._decoder.log_probs(self._hidden))

    def draw(self, sampling: Sampling, values: Draw) -> np.ndarray:
        """Draws the next token of each row and reads it: int32 `[rows]`; see `Decoder.draw`.

        Raises:
            InputError: no next word has a finite log-probability.
        """
        self._make_room()
        fixed = self._next_fixed()
        sample, self._hidden, self._carry = self._decoder.draw(
            self._hidden, self._carry, sampling, values, fixed
        )
        sample = jax.device_get(sample)
        if not np.isfinite(sample.log_prob).all():
            raise InputError(NOT_FINITE)
        self._append(sample.id, np.where(fixed < 0, sample.log_prob, 0))
        return sample.id

    def top_k(self, k: int, banned: tuple[int, ...] = ()) -> TopK:
        """The k most probable next tokens; see `Decoder.top_k`."""
        self._make_room()
        fixed = self._next_fixed()[:, None]
        # A row whose next token is fixed needs no prediction, and must not affect the other rows.
        scores = np.where(fixed[:, 0] < 0, self.totals.log_probs, -np.inf).astype(np.float32)
        best = jax.device_get(self._decoder.top_k(self._hidden, k, scores, banned))
        only = np.where(np.arange(best.ids.shape[1]) == 0, np.float32(0), -np.inf)
        return best._replace(
            ids=np.where(fixed < 0, best.ids, fixed),
            log_probs=np.where(fixed < 0, best.log_probs, only),
        )

    def read(self, ids: np.ndarray, log_probs: np.ndarray) -> None:
        """Appends a token to each row, int32 `[rows]`, with its log-probability, and reads it."""
        self._make_room()
        self._hidden, self._carry = self._decoder.read(ids[:, None], self._carry)
        self._append(ids, log_probs)

    def take(self, rows: np.ndarray) -> None:
        """Selects rows, int32, in their order; rows may repeat."""
        self.tokens = self.tokens[rows]
        self._fixed = [self._fixed[row] for row in rows]
        self._unwritten = self._unwritten[rows]
        self.totals = Totals(*(column[rows] for column in self.totals))
        self._hidden, self._carry = self._hidden[rows], self._decoder.take(self._carry, rows)

    def totals_with(self, rows: np.ndarray, ids: np.ndarray, log_probs: np.ndarray) -> Totals:
        """The totals of some rows, `[n]`, after one more token each."""
        before, words, lines = self.totals, self._options.words, self._options.lines
        log_prob, length, num_words, num_lines, ended = (column[rows] for column in before)
        going, eos = ~ended, ids == self.line_end
        written = self._unwritten[rows] == 0
        num_words = num_words + (going & self.vocabulary.ends_word[ids] & written)
        num_lines = num_lines + (going & eos)
        ended = ended | (num_words >= words) | ((lines > 0) & (num_lines >= lines))
        ended |= ends_example(ids, self.tokens[rows, -1], self.vocabulary.eos, self._break_mode)
        ended |= length + 1 >= MOST_UNITS * words  # sub-words may never end a word
        return Totals(
            log_prob + np.where(going, log_probs, 0), length + going, num_words, num_lines, ended
        )

    def _next_fixed(self):
        """The next token of each row's beginning, int32 `[rows]`; -1 after its end."""
        return np.array([tokens[0] if tokens else -1 for tokens in self._fixed], np.int32)

    def _append(self, ids, log_probs):
        self.totals = self.totals_with(np.arange(len(ids)), ids, log_probs)
        self.tokens = np.concatenate([self.tokens, ids[:, None]], axis=1)
        self._fixed = [tokens[1:] for tokens in self._fixed]
        self._unwritten = np.maximum(0, self._unwritten - 1)
        self._used += 1

    def _make_room(self):
        if self._decoder.limited and self._used == self._window:
            self._read_window()

    def _read_window(self):
        """Reads the text, or the end that fits a window, into a new cache."""
        seen = self.tokens
        if self._decoder.limited and seen.shape[1] >= self._window:
            seen = seen[:, -(self._window // 2) :]
        cache = self._decoder.cache(len(seen), self._window)
        self._hidden, self._carry = self._decoder.read(seen, cache)
        self._used = seen.shape[1]


def spellings(state: DecodeState, text: bytes, banned: tuple[int, ...]) -> list[ScoredTokens]:
    """Token sequences whose spelling begins with `text`, UTF-8, and whose last token reaches its
    end: the most probable first. Log-probabilities are conditional on this beginning, so the
    probabilities sum to 1.

    The search follows the most probable incomplete sequences, as many as the state has rows.
    """
    utf8, (rows, begin) = state.vocabulary.utf8, state.tokens.shape
    remainders, finished = [text], []
    state.begin([NO_TOKENS])
    while remainders:
        totals = state.totals.log_probs[:, None] + state.log_probs()
        totals[:, list(banned)] = -np.inf
        within = []
        for row, rest in enumerate(remainders):
            longer, shorter = state.vocabulary.beginning(rest)
            before = state.tokens[row, begin:]
            finished += [
                ScoredTokens(np.append(before, i), totals[row, i], len(before) + (utf8[i] == rest))
                for i in longer
            ]
            within += [(totals[row, i], row, i) for i in shorter]
        within = sorted(within, reverse=True)[:rows]
        if not within:
            break
        sums, chosen, ids = map(np.array, zip(*within, strict=True))
        remainders = [remainders[row][len(utf8[i]) :] for row, i in zip(chosen, ids, strict=True)]
        empty = 0, rows - len(within)
        state.take(np.pad(chosen, empty).astype(np.int32))
        state.read(np.pad(ids, empty).astype(np.int32), np.zeros(rows))
        sums = np.pad(sums, empty, constant_values=-np.inf)
        state.totals = state.totals._replace(log_probs=sums)
    total = np.logaddexp.reduce([spelling.log_prob for spelling in finished])
    if not np.isfinite(total):
        raise InputError(NOT_FINITE)
    finished = [one._replace(log_prob=float(one.log_prob - total)) for one in finished]
    return sorted(finished, key=lambda spelling: -spelling.log_prob)


def beam_search(
    state: DecodeState, banned: tuple[int, ...], beginnings: Sequence[ScoredTokens] = (NO_TOKENS,)
) -> list[ScoredTokens]:
    """The most probable complete texts, best first, at most one per row of the state.

    Each step extends all beams by every token and visits the results from the most probable one
    on. It collects complete texts until it has found as many incomplete ones as there are beams;
    these are the next beams. The search stops when no beam can become better than the collected
    texts. With as many beams as there are texts it is exhaustive.

    Args:
        state: has read the prompt, with one row per beam.
        banned: ids of tokens that are never written.
        beginnings: of the texts, the most probable first.
    """
    beams, survivors = len(state.tokens), []
    state.begin(beginnings[:beams])
    while len(survivors) < beams or state.totals.log_probs[0] > survivors[-1].log_prob:
        best = state.top_k(2 * beams, banned)
        totals = state.totals.log_probs.astype(np.float32)[:, None] + best.log_probs
        order = np.argsort(-totals, axis=None, kind="stable")[: 2 * beams]
        rows, columns = np.divmod(order[totals.ravel()[order] > -np.inf], totals.shape[1])
        ids, log_probs = best.ids[rows, columns], best.log_probs[rows, columns]
        longer = state.totals_with(rows, ids, log_probs)
        going = ~longer.ended
        in_beam = np.cumsum(going) - going < beams  # fewer incomplete texts come before it
        for i in np.flatnonzero(longer.ended & in_beam):
            tokens = np.append(state.text_of(rows[i]), ids[i])
            survivors.append(ScoredTokens(tokens, float(longer.log_probs[i])))
        survivors = sorted(survivors, key=lambda text: -text.log_prob)[:beams]
        chosen = np.flatnonzero(going & in_beam)
        if not len(chosen):
            break
        empty = 0, beams - len(chosen)  # rows without a text
        state.take(np.pad(rows[chosen], empty).astype(np.int32))
        state.read(
            np.pad(ids[chosen], empty), np.pad(log_probs[chosen], empty, constant_values=-np.inf)
        )
    return survivors


class Writer:
    """Continues a prompt. In runs of sub-words, the text may continue the prompt's last word,
    unless white space ends it: the end of the word is segmented again, together with what follows.

    If examples of training saw nothing before them (break modes "eos" and "complete_doc"), the
    model reads only the last example of the prompt, and the text stops where that example ends.

    Attributes:
        state: the texts being written.
    """

    def __init__(self, decoder: Decoder, lines: Lines, prompt: str, options: Options):
        """Reads the prompt.

        Raises:
            InputError: as `Options.check`, `Lines.encode` and `DecodeState`; or an unknown word to
                avoid.
        """
        options.check()
        self._options, self._lines = options, lines
        self._banned = tuple(_banned(lines, options.avoid))
        rows = options.beams or options.samples
        tokens, begun = lines.encode_open(prompt)
        self.state = DecodeState(decoder, tokens, options, rows)
        self._beginnings = [NO_TOKENS]
        if begun:
            state = DecodeState(decoder, tokens, options, SPELLINGS)
            self._beginnings = spellings(state, begun, self._banned)
        self._prompt_line = lines.decode(lines.encode(prompt)).rpartition("\n")[2]
        self._ends_in_space = prompt.endswith(" ") and not begun

    def continuations(self) -> list[Continuation]:
        """The texts: all samples, or the best ones of a beam search, the most probable first."""
        state, count = self.state, self._options.samples
        if self._options.beams:
            texts = beam_search(state, self._banned, self._beginnings)[:count]
            if not texts:
                raise InputError(NOT_FINITE)
        else:
            for _ in self._draws():
                pass
            sums = state.totals.log_probs.tolist()
            texts = [ScoredTokens(state.text_of(row), sums[row]) for row in range(count)]
        return [
            Continuation("".join(self._pieces(text.tokens)), text.tokens, text.log_prob)
            for text in texts
        ]

    def stream(self) -> Iterator[str]:
        """Yields the first of these texts in pieces, each as soon as it cannot change."""
        if self._options.beams:
            yield self.continuations()[0].text
        else:
            yield from self._pieces(self._first_sample())

    def _first_sample(self):
        for ids in self._draws():
            yield ids[0]
            if self.state.totals.ended[0]:
                return

    def _draws(self):
        """Yields the next tokens of all rows, until all texts are complete."""
        options = self._options
        greedy, key = options.temperature == 0, jax.random.key(options.seed)
        among = options.top_k if options.top_k < len(self._lines.vocabulary) else 0
        sampling = Sampling(1 if greedy else among, options.top_p < 1, self._banned)
        power = np.float32(1 if greedy else 1 / options.temperature)
        top_p = np.float32(options.top_p)
        if self._beginnings[0] is not NO_TOKENS:
            sums = np.array([text.log_prob for text in self._beginnings], np.float32)
            sums = sums[: sampling.k or None]
            shape = len(self.state.tokens), len(sums)
            best = np.broadcast_to(sums, shape), np.indices(shape)[1]
            fold_in, rows = jax.random.fold_in, np.arange(shape[0])
            keys = jax.vmap(lambda row: fold_in(fold_in(key, row), FIRST))(rows)
            columns = draw_among(TopK(*best, 0), keys, power, top_p).id.tolist()
            self.state.begin([self._beginnings[column] for column in columns])
        for number in itertools.count():
            yield self.state.draw(sampling, Draw(key, np.int32(number), power, top_p))
            if self.state.totals.ended.all():
                return

    def _pieces(self, tokens):
        """Yields the text of tokens after the prompt, word by word; a space that ends the prompt is
        not repeated.
        """
        pieces = self._after_line(tokens)
        if self._ends_in_space:
            yield next(pieces, "").removeprefix(" ")
        yield from pieces

    def _after_line(self, tokens):
        """Yields the text of tokens after the prompt's last line, word by word.

        If a word, such as a quotation mark, changes the text of the line before it, the rest of the
        line follows when the line is complete.
        """
        vocabulary, line, line_end = self._lines.vocabulary, self.state.line, self.state.line_end
        shown = self._prompt_line
        for token in tokens:
            line.append(token)
            if not vocabulary.ends_word[token]:
                continue
            text = self._lines.decode(line)
            if text.endswith(INCOMPLETE) and token != line_end:
                continue  # the next word may join the text before it
            if text.startswith(shown) or token == line_end:
                yield _without_shared_prefix(shown, text)
                shown = text
            if token == line_end:
                line, shown = [], ""
        if line:
            text = self._lines.decode(line)
            yield _without_shared_prefix(shown, text)


def _banned(lines, words):
    """Ids of words that are never written; `<unk>` is ignored if the run has none."""
    vocabulary = lines.vocabulary
    of_tokens = vocabulary.unit == "token" and vocabulary.spells
    for word in words:
        if of_tokens and word not in (EOS, UNKNOWN):
            same = [i for i, text in enumerate(vocabulary.utf8) if text.strip() == word.encode()]
            same += [i for i, text in vocabulary.special.items() if text.strip() == word]
            if not same:
                raise InputError(f"avoid={word!r} is no token of this run: leave it out")
            yield from same
        elif vocabulary.spells and word not in (EOS, UNKNOWN):
            units = lines.tokens([word])[0]
            if len(units) > 1:
                raise InputError(
                    f"avoid={word!r} is {len(units)} sub-words of this run, which other words have,"
                    " too: leave it out"
                )
            yield int(units[0])
        elif word in vocabulary.index:
            yield vocabulary.index[word]
        elif word != UNKNOWN:
            raise InputError(
                f"avoid={word!r} is not one of the {len(vocabulary):,} {vocabulary.unit}s of this"
                " run: leave it out"
            )


def _without_shared_prefix(shown, text):
    """The text without the prefix that it shares with `shown`."""
    return text[len(commonprefix([text, shown])) :]  # noqa: RUF071, of characters, not of paths


def next_words(decoder: Decoder, lines: Lines, text: str, k: int) -> list[tuple[str, float]]:
    """The k most probable words after a text and their probabilities; see
    `LoadedModel.next_words`.
    """
    check_at_least(1, k=k)
    vocabulary, k = lines.vocabulary, min(k, len(lines.vocabulary))
    if vocabulary.spells:
        options = Options(words=1, beams=2 * k, samples=2 * k, avoid=())
        probs = {}  # summed over all spellings of a word
        for written in Writer(decoder, lines, text, options).continuations():
            word = written.text.replace("\n", EOS)
            if vocabulary.unit == "word":
                word = word.removeprefix(" ")
            probs[word] = probs.get(word, 0.0) + math.exp(written.log_prob)
        return sorted(probs.items(), key=lambda pair: -pair[1])[:k]
    best = DecodeState(decoder, lines.encode(text), Options()).top_k(k)
    pairs = zip(best.ids[0].tolist(), np.exp(best.log_probs[0]).tolist(), strict=True)
    return [(vocabulary.words[token], prob) for token, prob in pairs]
