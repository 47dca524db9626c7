"""Rows of config files: each is a row of a paper's table, a model with published numbers.

A config file states what differs from the defaults, by dotted key, and has a row for each model:

    from adaptive_jax.config import rows
    from adaptive_jax.config.rows import Paper, Row

    SETTINGS = {"steps": 600, "data.corpus": "embedded", "body.layers": 2}
    LAYERS = {"lookup": {"input.name": "lookup", "output.name": "softmax"}}
    ROWS = {
        "sm": Row("lookup"),
        "sm_wide": Row("lookup", {"body.features": 512}, Paper(valid=20.95, table="Table 3")),
    }

    def get_config(row="sm"):
        return rows.config_of(row, __file__, ROWS, LAYERS, SETTINGS)

`adaptive_jax.config.keys` has every key; `keys.resolve` completes the config.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from adaptive_jax.errors import check_known, of_extra

if TYPE_CHECKING:
    from ml_collections import ConfigDict

# Groups of keys, outer ones before inner ones
GROUPS = ("metrics", "data", "batches", "input", "input.words", "body")
GROUPS += ("output", "output.table", "output.table.cnn", "optimizer", "schedule")


class Paper(NamedTuple):
    """Published numbers of a row, None where the paper gives none.

    valid, test: perplexity. parameters: millions, with the digits printed. hours: training time on
    the devices that the file's docstring names. table: where the perplexities are printed.
    """

    valid: float | None = None
    test: float | None = None
    parameters: float | None = None
    hours: float | None = None
    table: str | None = None


class Row(NamedTuple):
    """A model: the name of its settings in the file's `LAYERS`, its other settings, and its
    published numbers.

    The settings in `LAYERS` are those of input and output; for models of other papers than the
    file's, those of body and training too.
    """

    layers: str
    changes: Mapping[str, object] = {}
    paper: Paper = Paper()


def config(*changes: Mapping[str, object]) -> "ConfigDict":
    """A config, in groups, of settings by dotted key; later ones win.

    A group's `name` discards the group's earlier settings, which were keys of another class.
    """
    with of_extra("train"):  # layers, which need no such extra, import this module
        from ml_collections import ConfigDict

    merged: dict[str, object] = {}
    for flat in changes:
        for group in [key.removesuffix("name") for key in flat if key.endswith(".name")]:
            merged = {key: value for key, value in merged.items() if not key.startswith(group)}
        merged |= flat
    settings: dict = {}
    for group in GROUPS:
        put(settings, group, {})
    for key, value in merged.items():
        put(settings, key, value)
    return ConfigDict(settings, type_safe=False)


def put(config: dict, key: str, value: object) -> None:
    """Sets a dotted key of a config, and makes missing groups."""
    *groups, last = key.split(".")
    for name in groups:
        config = config.setdefault(name, {})
    config[last] = value


def config_of(
    row: str, file: str, rows: Mapping[str, Row], layers: Mapping[str, dict], settings: dict
) -> "ConfigDict":
    """The config of a row of a file: the file's settings, the row's layers, the row's changes.

    Raises:
        InputError: the file has no such row.
    """
    check_known(f"row {row!r} of {file}", row, rows)
    return config(settings, layers[rows[row].layers], rows[row].changes)


def streams(count: int, words: int, epochs: int, window: int = 70) -> dict[str, int]:
    """Settings of a run that reads a text in `count` parallel streams, and evaluates after every
    epoch.

    words: number of words of the text, `<eos>` included.
    window: words of each stream that an update reads; see `mean_window`.
    """
    updates, tokens = round(words / count / mean_window(window)), window * count
    runs = {"steps": epochs * updates, "evaluate_every": updates, "checkpoint_every": updates}
    return runs | {"tokens_per_update": tokens, "tokens_per_device": tokens}


def mean_window(window: int) -> float:
    """Mean number of words of a stream that an update reads: 1 window in 20 is half as long, and
    lengths are rounded down.
    """
    return 0.975 * window - 0.5
