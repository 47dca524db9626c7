"""Settings for a text of one's own: from its word counts, its length and the time there is to
train.

    read = tokens_to_read(config, words.counts, speed)    # words: all words of the train split
    data, why = choose_vocabulary(config["data"], words, read)
    config, lines = choose(config, counts, tokens, speed, devices)    # lines: what was chosen

Only settings that are None are chosen; the others stay as they are given. The rules are rules of
thumb, for a start; the sources of those that have one stand with them.
"""

import copy
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from adaptive_jax.config import rows
from adaptive_jax.config.keys import at, keys_of
from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN, Vocabulary
from adaptive_jax.errors import InputError, check_at_least
from adaptive_jax.parallel.progress import clock
from adaptive_jax.planning import cutoffs
from adaptive_jax.planning.cutoffs import Workload

# Vocabulary.
MOST_UNKNOWN = 0.05  # of the words of the text; beyond, sub-words
TYPICAL_WORDS = 10_000
LONG_TEXT = (
    50_000_000  # words, from which a word must occur three times, as in the Billion Word benchmark
)
MOST_WORDS = 1_000_000
CODES = 4  # byte-pair merges for the square root of a text's bytes: 400 for 10 kB, 4,000 for 1 MB
LEAST_CODES, MOST_CODES = 200, 32_000  # the most: Baevski & Auli 2019
# Bands.
FULL_SOFTMAX = 4_000  # words and fewer need no bands
BANDS = 4  # at most
NARROWEST = 16  # features of a band
# Time.
EFFICIENCY = 0.4  # speed of an update, as a share of the speed of matrix products alone
STARTING = 30  # seconds to read the text and to compile
WORKING = 0.95  # share of the rest that updates and evaluations take
EVALUATING = 0.1  # share of that for evaluations, and at most so many:
EVALUATIONS = 10
# Size and updates.
# Of the blocks, for each token of the text: so few do not learn it by heart, and more dropout than
# 0.1 harms
FEW_WEIGHTS = 3
MOST_WEIGHTS = (
    10  # of the blocks, for each token of the text: more learn it by heart, even with dropout
)
READINGS = 40  # of the text at most: Muennighoff et al. 2023 find that more teach nothing
LEAST_STEPS = 20
LEAST_BATCH, MOST_BATCH, PAPERS_BATCH = (
    256,
    65_536,
    16_384,
)  # tokens of an update; from the last, the paper's learning rate
LARGEST_MICROBATCH = 8_192  # tokens of a device at a time
WARM_UP, MOST_WARM_UP = 10, 16_000  # a tenth of the updates; the most: Baevski & Auli 2019
SIZES_GIVEN = (
    "steps",
    "tokens_per_update",
    "batches.sequence_length",
    "body.layers",
    "body.features",
    "body.heads",
)
DROPOUT = (
    (1.5, 0.0),
    (5, 0.1),
    (15, 0.2),
    (math.inf, 0.3),
)  # up to so many readings of the text, this rate


class Size(NamedTuple):
    """A transformer: its blocks, their width and heads, and the tokens that it reads at once."""

    layers: int
    features: int
    heads: int
    length: int


SIZES = (
    Size(2, 64, 2, 64),
    Size(2, 128, 4, 64),
    Size(2, 192, 4, 64),
    Size(4, 256, 8, 128),
    Size(6, 384, 8, 256),
    Size(6, 512, 8, 256),
    Size(8, 768, 12, 256),
    Size(12, 1024, 16, 512),
    Size(16, 1024, 16, 512),
    Size(24, 1536, 24, 512),
)


class Candidate(NamedTuple):
    """A size for a text.

    cutoffs: of its bands. flops: of training, per token. read: tokens that it reads in the time
        given, or as many as teach it
    something. seconds: that this takes. loss: `predicted_loss`.
    """

    size: Size
    cutoffs: tuple[int, ...]
    flops: float
    read: float
    seconds: float
    loss: float


def tokens_to_read(config: Mapping, counts: np.ndarray, speed: Mapping[int, float]) -> float:
    """About how many words training will read in `config["choose"]["hours"]`, before the vocabulary
    is known.

    counts: of all words of the train split. A vocabulary of 10,000 words is assumed.
    """
    total = int(counts.sum())
    return _best(config, counts[:TYPICAL_WORDS], {"train": total}, speed).read


def choose_vocabulary(data: Mapping, words: Vocabulary, read: float) -> tuple[dict, str]:
    """The settings `data` with threshold, limit and codes filled in, and a line that says why.

    Words that training meets less than twice, of a text of 50M words three times, become `<unk>`,
    and the model learns when to expect that. The share of words that occur once estimates that of
    unseen words in other text (Good 1953). If more than 5 % of the text would become `<unk>`, as in
    a short text or one whose words are not separated by spaces, the vocabulary is one of sub-words,
    which can spell every word.

    words: all words of the train split. read: words that training will read, see `tokens_to_read`.
    """
    keys = "threshold", "limit", "codes"
    given = {key: data[key] for key in keys if data[key] is not None}
    if given:
        filled = {"threshold": 1, "limit": 0, "codes": 0} | given
        return dict(data) | filled, "as asked: " + ", ".join(
            f"data.{key}={value}" for key, value in given.items()
        )
    counts = {
        word: n
        for word, n in zip(words.words, words.counts.tolist(), strict=True)
        if word not in (EOS, UNKNOWN)
    }
    if not counts:
        raise InputError("the text has no words: put text in it, one sentence or paragraph a line")
    total, numbers = int(words.counts.sum()), np.fromiter(counts.values(), np.int64)
    # Something must become <unk>, or the model could not read an unseen word.
    threshold = max(
        2 if total < LONG_TEXT else 3, math.ceil(2 * total / read), int(numbers.min()) + 1
    )
    share = numbers[numbers < threshold].sum() / numbers.sum()
    if share <= MOST_UNKNOWN:
        kept = int((numbers >= threshold).sum())
        limit = MOST_WORDS if kept > MOST_WORDS else 0
        kept = f"{min(kept, MOST_WORDS):,} of {len(counts):,}"
        line = (
            f"words seen {threshold} times or more, {kept}: {share:.1%} of the text become"
            f" {UNKNOWN}"
        )
        return dict(data) | {"threshold": threshold, "limit": limit, "codes": 0}, line
    size = sum(n * (1 + len(word.encode())) for word, n in counts.items())
    codes = min(max(round(CODES * math.sqrt(size)), LEAST_CODES), MOST_CODES)
    line = (
        f"sub-words, {codes:,} merges: of whole words, {share:.1%} of the text would become"
        f" {UNKNOWN}"
    )
    return dict(data) | {"threshold": 1, "limit": 0, "codes": codes}, line


def choose(
    config: Mapping,
    counts: np.ndarray,
    tokens: Mapping[str, int],
    speed: Mapping[int, float],
    devices: int = 1,
) -> tuple[dict, list[str]]:
    """The config with every setting that is None filled in, and lines that say what was chosen and
    why.

    The size is the one of `SIZES` whose `predicted_loss` is lowest for the tokens that it reads in
    `config["choose"]["hours"]`, among those whose blocks have at most 10 weights for each token of
    the text.

    counts: int `[V]`, how often each token of the vocabulary occurs in the train split, most
        frequent first.
    tokens: of each split.
    speed: FLOP/s of matrix products on all devices together, by the width of the vectors.
    devices: that share an update.

    Raises:
        InputError: hours that are not positive.
    """
    hours = config["choose"]["hours"]
    check_hours(hours)
    check_at_least(1, **{key: at(config, key) for key in SIZES_GIVEN if not _is_open(config, key)})
    best = _best(config, counts, tokens, speed)
    length = best.size.length
    batch = (
        _batch(best.read, length * devices)
        if _is_open(config, "tokens_per_update")
        else config["tokens_per_update"]
    )
    steps = (
        max(LEAST_STEPS, round(best.read / batch)) if _is_open(config, "steps") else config["steps"]
    )
    readings = steps * batch / tokens["train"]
    dropout = next(rate for most, rate in DROPOUT if readings <= most)
    if _weights(best.size) < FEW_WEIGHTS * tokens["train"]:
        dropout = min(dropout, 0.1)
    chosen_warm_up = max(1, min(steps // WARM_UP, MOST_WARM_UP))
    warm_up = (
        chosen_warm_up
        if _is_open(config, "schedule.warmup_steps")
        else config["schedule"]["warmup_steps"]
    )
    # Scoring a token takes a third of the work of training on it.
    evaluations = int(EVALUATING * 3 * steps * batch / max(1, tokens["validation"]))
    evaluations = min(max(evaluations, 1), EVALUATIONS)
    # Of nag the paper's
    rate = keys_of("optimizer", config["optimizer"]["name"])["learning_rate"].default
    chosen = {
        "steps": steps,
        "tokens_per_update": batch,
        "tokens_per_device": max(length, min(batch // devices, LARGEST_MICROBATCH)),
        "log_every": max(1, steps // 50),
        "evaluate_every": -(-steps // evaluations),
        "checkpoint_every": -(-steps // evaluations),
        "data.vocabulary_size": len(counts),
        "batches.sequence_length": length,
        "input.cutoffs": best.cutoffs,
        "body.layers": best.size.layers,
        "body.features": best.size.features,
        "body.heads": best.size.heads,
        "body.feed_forward": 4 * best.size.features,
        "body.dropout": dropout,
        "body.attention_dropout": min(dropout, 0.1) if readings > 5 else 0.0,
        "optimizer.learning_rate": rate if batch >= PAPERS_BATCH else rate / 2,
        "schedule.warmup_steps": warm_up,
        "schedule.cycle_steps": max(1, steps - warm_up),
    }
    filled = copy.deepcopy(dict(config))
    for key, value in chosen.items():
        if _is_open(filled, key):
            rows.put(filled, key, value)
    seconds = steps * batch * best.seconds / best.read
    return filled, _lines(
        filled, best.cutoffs, seconds, readings, _weights(best.size) / tokens["train"]
    )


def check_hours(hours: float) -> None:
    """Raises InputError for hours that are not positive."""
    if not 0 < hours < math.inf:
        raise InputError(
            f"choose.hours={hours} must be a number above 0: give --hours=1.5 for an hour and a"
            " half"
        )


def predicted_loss(size: Size, unique: float, read: float) -> float:
    """Nats a token after reading `read` tokens of a text of `unique` tokens; it only ranks sizes.

    The compute-optimal law of Hoffmann et al. 2022, in the fit of Muennighoff et al. 2023, where a
    token counts less each time that it is read again. Parameters are those of the blocks: in small
    models most of the others are a table of rare words.
    """
    worth = min(unique, read)
    worth *= 1 + 15.39 * -math.expm1(-(read / worth - 1) / 15.39)
    return 1.87 + 521 / _weights(size) ** 0.353 + 1488 / worth**0.353


def training_flops(size: Size, softmax: float) -> float:
    """FLOPs of training per token: three times those of the blocks forward, and those of the
    softmax, which counts both ways.

    A block has 12 · features² weights, each of which takes two, and each token attends to `length`
    others.
    """
    return 3 * (2 * _weights(size) + 4 * size.layers * size.length * size.features) + softmax


def _weights(size):
    return 12 * size.layers * size.features**2


def _sizes(config, tokens):
    """The sizes, with what the config sets itself; rows are no longer than the shortest split."""
    body = {
        key: config["body"][key]
        for key in ("layers", "features", "heads")
        if config["body"][key] is not None
    }
    most = 2 ** int(math.log2(max(2, min(tokens.values()))))
    length = config["batches"]["sequence_length"]
    given = [size._replace(length=length or min(size.length, most), **body) for size in SIZES]
    sizes = [size for size in dict.fromkeys(given) if size.features % size.heads == 0] or given
    return [size for size in sizes if _weights(size) <= MOST_WEIGHTS * tokens["train"]] or sizes[:1]


def _best(config, counts, tokens, speed):
    candidates = [
        _candidate(size, config, counts, tokens, speed) for size in _sizes(config, tokens)
    ]
    return min(candidates, key=lambda candidate: candidate.loss)


def _candidate(size, config, counts, tokens, speed):
    given = "cutoffs" in config["input"] and not _is_open(config, "input.cutoffs")
    cuts = tuple(config["input"]["cutoffs"]) if given else _bands(size.features, counts)
    flops = training_flops(size, cutoffs.cost(counts, cuts, Workload(size.features)))
    rate = (
        EFFICIENCY * speed[min(speed, key=lambda width: abs(width - size.features))] / flops
    )  # tokens a second
    total = 3600 * config["choose"]["hours"]
    budget = WORKING * max(total - STARTING, total / 3)
    read = min(budget * (1 - EVALUATING) * rate, READINGS * tokens["train"])
    return Candidate(
        size, cuts, flops, read, read / rate, predicted_loss(size, tokens["train"], read)
    )


def _bands(features, counts):
    """The planner's cutoffs for the number of bands that has least work; none for a small
    vocabulary.
    """
    words, widest = len(counts), 1 + int(math.log(features / NARROWEST, Workload().factor))
    if words <= FULL_SOFTMAX:
        return ()
    workload, smallest = Workload(features), cutoffs.smallest_band(words)
    choices = [
        cutoffs.propose(counts, bands, workload, smallest)
        for bands in range(1, min(widest, BANDS) + 1)
    ]
    return min(choices, key=lambda choice: choice[1])[0]


def _batch(read, multiple):
    """Tokens of an update: twice the square root of those read in all, as a power of 2; 2,048
    for a million.
    """
    wanted = 2 ** round(math.log2(2 * math.sqrt(max(read, 1))))
    return max(1, round(min(max(wanted, LEAST_BATCH), MOST_BATCH) / multiple)) * multiple


def _is_open(config, key):
    """Whether a setting is to be chosen: None. A layer of the user's choice may have no such
    setting.
    """
    group, _, last = key.rpartition(".")
    settings = at(config, group)
    return last in settings and settings[last] is None


def _lines(config, cuts, seconds, readings, weights):
    body, hours, steps, batch = (
        config["body"],
        config["choose"]["hours"],
        config["steps"],
        config["tokens_per_update"],
    )
    bands = "none: a full softmax over so few costs little"
    if cuts:
        bands = (
            f"cutoffs {', '.join(f'{cut:,}' for cut in cuts)}: an adaptive softmax of least work"
        )
    model = f"{body['layers']} blocks of {body['features']:,} features, {body['heads']} heads"
    most = " (more would teach nothing)" * (readings > READINGS - 1)
    return [
        f"bands        {bands}",
        f"model        {model}: predicted to be the best for {steps * batch:,} tokens of training",
        (
            f"training     {steps:,} updates of {batch:,} tokens,"
            f" {config['schedule']['warmup_steps']:,} of them warm-up"
        ),
        (
            f"dropout      {body['dropout']}: training reads the text {readings:,.1f} times{most},"
            f" and the blocks have {weights:.2g} weights for each of its tokens"
        ),
        (
            f"time         about {clock(seconds)} of updates, of {clock(3600 * hours)} asked for"
            f" (choose.hours={hours:g})"
        ),
    ]
