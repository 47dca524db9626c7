"""Settings that the text decides in a config with `own_text`: splits, vocabulary, cutoffs.
configs/own_text.py has such configs.
"""

import copy
import math
from collections.abc import Mapping

from adaptive_jax.config import cache, rows
from adaptive_jax.config.keys import at, maker, word_group
from adaptive_jax.data.corpora.load import count_words, load
from adaptive_jax.data.corpora.split import split_lines, unsplit_text
from adaptive_jax.data.vocabulary.subwords import TooManyCodes
from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN, Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.files import path_of
from adaptive_jax.model.language_model import LanguageModel
from adaptive_jax.parallel import hosts
from adaptive_jax.planning.coverage import workload
from adaptive_jax.planning.cutoffs import propose
from adaptive_jax.runs.settings import read_config, read_words

# The keys that the text decides where they have these values, beside those of `_open_cutoffs`.
OPEN = {"data.threshold": 1, "data.codes": 0, "data.vocabulary_size": 0}
MOST_UNKNOWN = 0.05  # of the words of the validation text; beyond, sub-words
FULL_SOFTMAX = 4_000  # words and fewer need no bands
BANDS = 3  # of more words (Baevski & Auli 2019)
MERGES = 4  # for the square root of a text's bytes: 400 for 10 kB, 4,000 for 1 MB
LEAST_MERGES, MOST_MERGES = 200, 32_000  # the most: Baevski & Auli 2019


def with_text(config: dict, begun: dict | None, model: LanguageModel) -> dict:
    """The config, of `own_text`, with a value for each key that its text decides.

    A new run reads the text and prints the choices; one that has begun keeps those that it began
    with. All hosts call this.

    begun: the config of the run that has begun; None if none has.
    model: of the config, with a vocabulary of any size.

    Raises:
        InputError: no text, and see `split_lines` and `load`.
    """
    config = copy.deepcopy(config)
    data = config["data"]
    lines = _split(data)
    open_keys = [key for key, value in OPEN.items() if at(config, key) == value]
    open_cutoffs = _open_cutoffs(config)
    if begun:
        if 0 < begun["data"]["codes"] < data["codes"]:  # the text gave no more
            open_keys.append("data.codes")
        for key in (*open_keys, *open_cutoffs):
            rows.put(config, key, at(begun, key))
        return config
    if chooses_words(data):
        held_out = count_words(data, "validation")
        chosen, line = choose_vocabulary(load(data, splits=()).vocabulary, held_out)
        data |= chosen
        lines.append(f"words        {line}")
    elif data["corpus"] == "ids" or data["tokenizer"]:
        lines.append("words        the ids of the tokenizer, the most frequent first")
    try:
        vocabulary = load(data).vocabulary
    except TooManyCodes as error:
        if not error.able:
            raise
        data["codes"] = error.able
        lines.append(f"merges       only {error.able}: they make every word of this text one unit")
        vocabulary = load(data).vocabulary
    size = total = len(vocabulary)
    if config["init_from"] and config["init_words"] == "both":
        total = len(vocabulary.with_words(read_words(path_of(config["init_from"])).words))
    data["vocabulary_size"] = data["vocabulary_size"] or total
    if open_cutoffs:
        count, bands = 1, "none: a full softmax over so few words is cheap"
        if config["init_from"]:  # parameters fit another vocabulary, not another number of bands
            origin = read_config(path_of(config["init_from"]))
            count, bands = 1 + len(at(origin, open_cutoffs[0])), "none, as in the run of init_from"
        elif size > FULL_SOFTMAX:
            count = BANDS
        if count > 1:
            cutoffs, _ = propose(vocabulary.counts, count, workload(config, model))
            for key in open_cutoffs:
                rows.put(config, key, cutoffs)
            bands = (
                f"cutoffs {', '.join(f'{n:,}' for n in cutoffs)}: the least work of {count} bands"
            )
        lines.append(f"bands        {bands}")
    for line in lines:
        hosts.log0(line)
    return config


def chooses_words(data: Mapping) -> bool:
    """True if the text of a config with `own_text` decides what its words are."""
    fixed = any(data[key] for key in ("limit", "words", "codes", "tokenizer"))
    return data["threshold"] == 1 and data["corpus"] != "ids" and not fixed


def choose_vocabulary(words: Vocabulary, held_out: Mapping[str, int]) -> tuple[dict, str]:
    """The settings `threshold` or `codes` for a text of these words, and a line that says why.

    A word that occurs once becomes `<unk>`, so that the model learns when to expect a new one. If
    more than 5 % of the validation text would become `<unk>`, as with a short text, one that
    changes its subject, or one whose words are not separated by spaces, the vocabulary is one of
    sub-words, which can spell every word.

    words: all words of the train split.
    held_out: how often each word of the validation split occurs.
    """
    counts = {word: n for word, n in words.counts_by_word.items() if word not in (EOS, UNKNOWN)}
    if not counts:
        raise InputError("the text has no words: put text in it, one sentence or paragraph a line")
    # Something must become <unk>, or the model could not read an unseen word.
    threshold = max(2, min(counts.values()) + 1)
    frequent = {word for word, n in counts.items() if n >= threshold}
    held_out = {word: n for word, n in held_out.items() if word not in (EOS, UNKNOWN)}
    unknown = sum(n for word, n in held_out.items() if word not in frequent)
    share = unknown / max(1, sum(held_out.values()))
    if share <= MOST_UNKNOWN:
        return {"threshold": threshold}, (
            f"words seen {threshold} times or more, {len(frequent):,} of {len(counts):,}:"
            f" {share:.1%} of the validation text become {UNKNOWN}"
        )
    size = sum(n * (1 + len(word.encode())) for word, n in counts.items())
    codes = min(max(round(MERGES * math.sqrt(size)), LEAST_MERGES), MOST_MERGES)
    return {"codes": codes}, (
        f"sub-words, {codes:,} merges: of whole words, {share:.1%} of the validation text"
        f" would become {UNKNOWN}"
    )


def _open_cutoffs(config: Mapping) -> list[str]:
    """The keys of empty cutoffs that the text decides: those of the input, unless clusters cut its
    words or an output tied to its table needs one band; and those of an adaptive softmax with a
    table of its own.
    """
    output, table = config["output"], config["output"]["table"]["name"]
    many_bands = getattr(maker("output", output["name"]), "many_bands", True)
    one_band = not many_bands or output.get("classes") or output["table"].get("cutoffs")
    if output["clusters"] or (table == "tied" and one_band):
        return []
    keys = [f"{word_group(config)}.cutoffs"]
    if (output["name"], table) == ("adaptive", "own"):
        keys.append("output.table.cutoffs")
    return [key for key in keys if at(config, key) == ()]


def _split(data: dict) -> list[str]:
    """Makes `data.path` a directory of three splits; returns the line about it, or nothing."""
    if data["corpus"] != "text_files":
        return []
    if not data["path"]:
        raise InputError(
            "configs/own_text.py needs a text: pass --config.data.path=DIR, with train.txt,"
            " valid.txt and test.txt in it or files of one text"
        )
    text = unsplit_text(data["path"])
    if text is None:
        return []
    directory, (train, validation, test) = split_lines(text, cache.directory())
    count = len(text.files)
    name = text.files[0] if count == 1 else f"{data['path']}, {count:,} files,"
    data["path"] = str(directory)
    return [
        f"text         {name} is split: its first {train:,} lines train, the next {validation:,}"
        f" validate, the last {test:,} test; copies in {directory}"
    ]
