"""The settings that a config leaves to be chosen: see configs/own_text.py, planning/choose.py."""

from collections.abc import Mapping
from pathlib import Path

import jax

from adaptive_jax.data.corpora.load import cache_of, load
from adaptive_jax.data.corpora.split import single_file, split_lines
from adaptive_jax.data.vocabulary.subwords import TooManyCodes
from adaptive_jax.errors import InputError
from adaptive_jax.parallel import accelerators, hosts
from adaptive_jax.parallel.speed import product_speed
from adaptive_jax.planning.choose import (
    SIZES,
    check_hours,
    choose,
    choose_vocabulary,
    tokens_to_read,
)
from adaptive_jax.workdir.settings import read_config


def settle(config: dict, workdir: Path) -> dict:
    """The config with a value for every setting that is None, if it has the group `choose`;
    otherwise the config itself.

    A new run reads the text, measures the devices, and prints what is chosen. One that has begun
    takes what it began with. A text in one file is split. All hosts call this.

    Raises:
        InputError: no text, hours that are not positive, and see `split_lines`, `load`, `choose`.
    """
    if "choose" not in config:
        return config
    check_hours(config["choose"]["hours"])
    body = config["body"]["name"]
    if not body.startswith("transformer"):
        raise InputError(
            f"config.body.name={body!r}: configs/own_text.py chooses sizes of transformers only;"
            " give another config"
        )
    data, lines = _with_text(config["data"])
    config = config | {"data": data}
    if (workdir / "config.json").exists():
        return _filled(config, read_config(workdir))
    whole = {"threshold": 1, "limit": 0, "codes": 0}
    known = {"vocabulary_size": data["vocabulary_size"] or 0}
    of_ids = data["corpus"] == "ids"
    if of_ids:  # nothing is to be chosen, and a limit that is given is refused
        data = data | {key: value for key, value in whole.items() if data[key] is None}
    words = load(data | known if of_ids else data | known | whole, splits=()).vocabulary
    speed = product_speed({size.features for size in SIZES})
    if of_ids:
        vocabulary = f"all {len(words):,} ids of the tokenizer, the most frequent first"
    else:
        read = tokens_to_read(config, words.counts, speed)
        data, vocabulary = choose_vocabulary(data, words, read)
    hosts.say("\n".join([*lines, f"words        {vocabulary}"]))
    try:
        corpus = load(data | known)
    except TooManyCodes as error:
        if config["data"]["codes"] is not None or not error.able:
            raise
        data = data | {"codes": error.able}
        hosts.say(f"merges       only {error.able}: they make every word of this text one unit")
        corpus = load(data | known)
    fast = accelerators.accelerator(jax.devices()[0].device_kind) is not None
    config = _filled(config | {"data": data}, {"dtype": "bfloat16" if fast else "float32"})
    tokens = {split: len(ids) for split, ids in corpus.ids.items()}
    chosen, why = choose(config, corpus.vocabulary.counts, tokens, speed, jax.device_count())
    hosts.say(
        "\n".join([*why, "change       any of it by --config.KEY=VALUE, with a new --workdir"])
    )
    return chosen


def _with_text(data: Mapping) -> tuple[dict, list[str]]:
    """The group `data` with a directory of three splits as its path, and the line that tells of
    a split.
    """
    if data["corpus"] != "text_files":
        return dict(data), []
    if not data["path"]:
        raise InputError(
            "configs/own_text.py needs a text: give --config.data.path=DIR, with train.txt,"
            " valid.txt and test.txt in it or one text file"
        )
    file = single_file(data["path"])
    if file is None:
        return dict(data), []
    directory, (train, validation, test) = split_lines(file, cache_of(data["cache"]))
    line = (
        f"text         {file} is split: its first {train:,} lines train, the next {validation:,}"
        f" validate, the last {test:,} test; copies in {directory}"
    )
    return dict(data) | {"path": str(directory)}, [line]


def _filled(config, values):
    """The config with `values` in place of None."""
    filled = {}
    for key, value in config.items():
        if isinstance(value, dict):
            filled[key] = _filled(value, values.get(key, {}))
        else:
            filled[key] = values.get(key) if value is None else value
    return filled
