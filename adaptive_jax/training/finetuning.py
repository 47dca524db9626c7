"""Starting a run from the parameters of another one, whose vocabulary may differ."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import optax
from flax import traverse_util
from jax.sharding import Mesh

from adaptive_jax.config.keys import General
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.vocabulary.clusters import in_order
from adaptive_jax.data.vocabulary.lexicon import lexicon
from adaptive_jax.data.vocabulary.ngrams import counted_settings
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.files import in_bucket, path_of
from adaptive_jax.model.language_model import LanguageModel, parameter_shapes
from adaptive_jax.parallel import hosts, sharding
from adaptive_jax.runs.checkpoints import steps_in
from adaptive_jax.runs.identity import differences
from adaptive_jax.runs.parameters import checkpoint_step
from adaptive_jax.runs.run import Run
from adaptive_jax.runs.settings import (
    as_json,
    begun_config,
    read_config,
    read_words,
    with_own_files,
)
from adaptive_jax.training.state import State

logger = logging.getLogger(__name__)

BY_WORD = "table", "bias", "corrections"  # parameters with a row for each word
BY_BAND = re.compile(r"(table|norm)_(\d+)")  # those with a row for each word of a band
HEAD = "head"  # has one for each word of band 0
# Parameters of outputs with a row for each cluster, whose number may depend on the vocabulary
BY_CLUSTER = "clusters", "cluster_bias", "projections"
# Settings of layers, and those of them that do not change the meaning of parameters
LAYERS = re.compile(r"(input|body|output)\.")
OF_TRAINING = re.compile(
    r"drop|init_|remat|cutoffs|clusters|lexicon|smoothing|z_loss|samples|proposal|max_positions"
    r"|\.(t?ar|counts|least)$"
)
ONE_SOFTMAX = {"softmax", "sampled", "nce"}  # in evaluation


def check_origin(config: Mapping, workdir: Path) -> None:
    """Checks, before a long preparation, that the run `config["init_from"]` exists, if a new run in
    `workdir` starts from one.

    Raises:
        InputError: no run or checkpoint there, or a checkpoint of no run.
    """
    for key in "init_checkpoint", "init_words":
        if not config["init_from"] and (value := config[key]) != getattr(General, key):
            raise InputError(f"{key}={value} needs init_from: pass --init_from=RUN, too")
    if config["init_from"] and not steps_in(workdir / "checkpoints"):
        _config_of(config["init_from"])
        checkpoint_step(path_of(config["init_from"]), config["init_checkpoint"])


def config_of_origin(init_from: str, workdir: Path | None = None) -> dict:
    """The config of a run that starts from another one without a config of its own: that of the
    other run, except for what it logs; of a run that has begun, its own. Neither is trusted, so
    nothing is fetched that it names: the copy of the lexicon replaces one in a bucket.

    workdir: of the run that starts; None if it has not begun.

    Raises:
        InputError: no run there, or a damaged config.
    """
    begun = begun_config(workdir) if workdir else None
    config, place = (begun, workdir) if begun else (_config_of(init_from), path_of(init_from))
    config |= {"input": with_own_files(config, place, other_words=True)["input"]}
    for group, key in ("output", "clusters"), ("data", "tokenizer"), ("data", "words"):
        if in_bucket(path := config[group][key]):
            logger.warning("%s.%s=%s is left out: name the file by a flag", group, key, path)
            config[group] |= {key: ""}
    if begun:
        return config
    if counted_settings(config):
        config["input"]["counts"] = ""  # those of the new text
    if config["own_text"] and config["data"]["corpus"] != "ids":
        config["data"]["vocabulary_size"] = 0  # that of the new text
    start = {key: getattr(General, key) for key in ("init_from", "init_checkpoint", "init_words")}
    return config | start | {"metrics": {}}


def _config_of(init_from):
    try:
        return read_config(path_of(init_from))
    except InputError as error:
        raise InputError(f"init_from={init_from}: {error}") from None


def check_fits(config: Mapping, workdir: Path, model: LanguageModel) -> None:
    """Checks that the run `config["init_from"]`, if any, can start `model` in a new workdir. Warns
    where shapes are the same and settings are not, such as the heads of attention.

    model: of any vocabulary.

    Raises:
        InputError: the run is damaged, or its model differs by more than its vocabulary.
    """
    if config["init_from"] and not steps_in(workdir / "checkpoints"):
        other = Run.of(path_of(config["init_from"]))
        shapes = parameter_shapes(other.model), parameter_shapes(model)
        _check_same_model(config["init_from"], *shapes)
        _warn_of_other_settings(config, other.saved_config)


def vocabulary_for(config: Mapping, workdir: Path, vocabulary: Vocabulary) -> Vocabulary:
    """The vocabulary of a run whose corpus has `vocabulary`: in the order of its clusters, if it
    has some; with `init_words="both"`, also with the words of `init_from`, counted in the corpus.

    A run that has begun has these words, or their order, in its own vocabulary, so that it resumes
    without the other run, or the file of clusters.

    Raises:
        InputError: the other run is missing or damaged, or has sub-word units; clusters that do not
            fit, see `in_order`.
    """
    begun = (workdir / "config.json").exists()
    adds_old_words = config["init_from"] and config["init_words"] != "new"
    if clusters := config["output"]["clusters"]:
        if adds_old_words:
            raise InputError(
                f"init_words=both adds words that output.clusters={clusters!r} does not have: leave"
                " one of them out"
            )
        if begun and not path_of(clusters).exists():
            saved = read_words(workdir)
            return saved if saved.same_words(vocabulary) else vocabulary
        return in_order(vocabulary, clusters)
    if not adds_old_words:
        return vocabulary
    words = read_words(workdir if begun else path_of(config["init_from"]))
    if {type(vocabulary), type(words)} != {Vocabulary}:
        raise InputError(
            "init_words=both is for words, and sub-word units or ids of a tokenizer are complete:"
            " leave it out"
        )
    everything = config["data"] | {"threshold": 1, "limit": 0, "words": ""}
    counts = load(everything, splits=()).vocabulary.counts_by_word
    return vocabulary.with_words(words.words, counts)


def finetuned(
    config: Mapping,
    state: State,
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    vocabulary: Vocabulary,
    mesh: Mesh,
) -> State:
    """The fresh `state` with the parameters of the run `config["init_from"]`, or the averages that
    its optimizer made.

    Rows of words that both vocabularies have are carried over by word; those of new words, and of
    words that lie in another band than before, stay as they are, at random. Vectors that a model
    composes from the lexicon have no rows: the same parameters compose those of other words.

    vocabulary, mesh: the words of `model`, and the devices of `state`.

    Raises:
        InputError: as `Run.open`.
    """
    run = Run.open(path_of(config["init_from"]), config["init_checkpoint"])
    _check_same_model(config["init_from"], run.params, state.params)
    ids = {entry: i for i, entry in enumerate(run.vocabulary.names)}
    kinds = {(type(v), v.model if v.unit == "token" else b"") for v in (run.vocabulary, vocabulary)}
    if len(kinds) > 1:  # a sub-word or an id is not a word; ids differ by tokenizer
        ids = {}
    old_ids = np.array([ids.get(entry, -1) for entry in vocabulary.names])
    same_ids = np.array_equal(old_ids[: len(ids)], np.arange(len(ids))) and ids
    same_ngrams = same_ids and _ranks(run.model, run.vocabulary) == _ranks(model, vocabulary)
    old_arrays = traverse_util.flatten_dict(sharding.on_host(run.params, run.mesh))
    fresh_arrays = traverse_util.flatten_dict(sharding.on_host(state.params, mesh))
    shardings = traverse_util.flatten_dict(jax.tree.map(lambda a: a.sharding, state.params))
    bands = run.model.word_tables(), model.word_tables()
    arrays, carried = _carry_over(old_arrays, fresh_arrays, old_ids, bands, same_ngrams)
    line = "all word vectors are composed, so new words start with a vector as others do"
    if any(_by_word(path) and path[-1] != "bias" for path in fresh_arrays):
        new_words = int(np.sum(old_ids < 0))
        moved = len(old_ids) - new_words - int(carried.sum())
        line = (
            f"vectors of {carried.sum():,} of {len(old_ids):,} words carried over; {new_words:,}"
            f" new words and {moved:,} that moved to another band start at random"
        )
    hosts.log0(f"init_from    {config['init_from']} after {run.step:,} updates: {line}")
    params = {path: sharding.put(array, shardings[path]) for path, array in arrays.items()}
    params = traverse_util.unflatten_dict(params)
    layout = jax.tree.map(lambda a: a.sharding, state.optimizer)
    return state._replace(
        params=params, optimizer=jax.jit(optimizer.init, out_shardings=layout)(params)
    )


def _carry_over(old_arrays, fresh_arrays, old_ids, bands, same_ngrams):
    """The arrays to start from, by path, and for each word whether a vector of it was carried over,
    bool `[words]`.

    old_ids: of each word in the other run, int `[words]`; -1 of new words. bands: the words of each
    band in the old and the new tables, by path, see `LanguageModel.word_tables`.
    """
    arrays, carried = {}, np.zeros(len(old_ids), bool)
    for path, fresh in fresh_arrays.items():
        array = old_arrays[path]
        whole_vocabulary = fresh.shape[:1] == (len(old_ids),)
        if _by_word(path) and (whole_vocabulary or path[-1] not in BY_WORD):
            first, old_first = _first_word(fresh_arrays, path), _first_word(old_arrays, path)
            old_rows = old_ids[first : first + len(fresh)] - old_first
            shared = (old_rows >= 0) & (old_rows < len(array))
            if path[-1] == "table" and len(bands[1].get(path, ())) > 1:
                old_band, band = (np.repeat(np.arange(len(b[path])), b[path]) for b in bands)
                shared &= band == old_band[np.where(shared, old_rows, 0)]
            fresh[shared] = array[old_rows[shared]]
            if path[-1] != "bias":
                carried[first : first + len(fresh)] |= shared
            array = fresh
        elif array.shape != fresh.shape or (_by_ngram(path) and not same_ngrams):
            array = fresh
        arrays[path] = array
    return arrays, carried


def _first_word(arrays, path):
    """The id of the word of a parameter's first row."""
    band = BY_BAND.fullmatch(path[-1])
    before = range(int(band[2])) if band else ()
    return sum(len(arrays[*path[:-1], f"{band[1]}_{k}"]) for k in before)


def _check_same_model(origin, old, new):
    """Raises InputError for parameters that differ by more than rows of words or of clusters."""
    old_shapes, new_shapes = (
        {path: a.shape for path, a in traverse_util.flatten_dict(params).items()}
        for params in (old, new)
    )
    for path in sorted({*old_shapes, *new_shapes}):
        before, now = old_shapes.get(path, "missing"), new_shapes.get(path, "missing")
        varies = _by_word(path) or (path[0] != "body" and path[-1] in BY_CLUSTER)
        if before != now and not (varies and before[1:] == now[1:]):
            raise InputError(
                f"init_from={origin} holds another model, whose parameter {'/'.join(path)} is of"
                f" shape {before}, and here {now}: only the vocabulary may differ"
            )


def _warn_of_other_settings(config, old):
    """Warns where layers compute something else than in the run whose parameters they get."""
    before, now = (
        {k: v for k, v in as_json(keys).items() if LAYERS.match(k) and not OF_TRAINING.search(k)}
        for keys in (old, config)
    )
    if {before["output.name"], now["output.name"]} <= ONE_SOFTMAX:
        del before["output.name"]
    if (differ := differences(before, now)) and hosts.first():
        logger.warning(
            "init_from=%s has parameters that fit, but layers compute something else with them: %s",
            config["init_from"],
            "; ".join(differ),
        )


def _by_word(path):
    """True if a parameter has rows of words. Biases of bodies have none."""
    if path[0] == "body" or _by_ngram(path):
        return False
    return bool(path[-1] in (*BY_WORD, HEAD) or BY_BAND.fullmatch(path[-1]))


def _ranks(model, vocabulary):
    """The counted n-grams of a model's rows; {} without."""
    spec = getattr(model.input, "lexicon_spec", {}).get("ngrams", {})
    return jax.tree.map(np.ndarray.tobytes, lexicon(vocabulary, {"ngrams": spec} if spec else {}))


def _by_ngram(path):
    """True for parameters of n-grams, whose rows follow from the ids of words."""
    return path[0] == "input" and path[1].startswith("ngrams_")
