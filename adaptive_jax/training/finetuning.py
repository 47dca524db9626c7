"""Starting a run from the parameters of another one, whose vocabulary may differ."""

import re
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import optax
from flax import traverse_util
from jax.sharding import Mesh

from adaptive_jax.config.keys import General
from adaptive_jax.data.vocabulary.clusters import in_order
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.evaluation.runs import Run, SavedRun
from adaptive_jax.files import path_of
from adaptive_jax.model.language_model import LanguageModel, parameter_shapes
from adaptive_jax.parallel import hosts, sharding
from adaptive_jax.training.state import State
from adaptive_jax.workdir.parameters import checkpoint_step
from adaptive_jax.workdir.settings import has_checkpoints, read_words

BY_WORD = "table", "bias", "corrections"  # parameters with a row for each word
BY_BAND = re.compile(r"(table|norm)_(\d+)")  # those with a row for each word of a band
HEAD = "head"  # has one for each word of band 0
# Of a projection's largest singular value: directions below it are left out, or rows would become
# too long
SMALLEST = 0.1
# Parameters of outputs whose clusters may be as many as the words ask for
BY_CLUSTER = "clusters", "cluster_bias", "projections"


def check_fits(config: Mapping, workdir: Path, model: LanguageModel) -> None:
    """Finds in a moment whether the run `config["init_from"]`, if any, can start `model` in a new
    workdir.

    Raises:
        InputError: no run or checkpoint there, one of a model that differs by more than its
            vocabulary, or a checkpoint of no run.
    """
    for key in "init_checkpoint", "init_words":
        if not config["init_from"] and (given := config[key]) != getattr(General, key):
            raise InputError(
                f"{key}={given} means nothing without init_from: give --init_from=RUN, too"
            )
    if config["init_from"] and not has_checkpoints(workdir):
        origin = path_of(config["init_from"])
        if not (origin / "config.json").exists():
            raise InputError(
                f"init_from={config['init_from']} holds no run (no config.json): give the workdir"
                " of a run"
            )
        other = SavedRun.read(origin).model()
        _check_same_model(config["init_from"], parameter_shapes(other), parameter_shapes(model))
        checkpoint_step(origin, config["init_checkpoint"])


def vocabulary_for(config: Mapping, workdir: Path, own: Vocabulary) -> Vocabulary:
    """The vocabulary of a run whose corpus has the vocabulary `own`: in the order of its clusters,
    if it has some; with `init_words="both"`, also with the words of `init_from`.

    A run that has begun has these words, or their order, in its own vocabulary, so that it resumes
    without the other run, or the file of clusters.

    Raises:
        InputError: the other run is missing or damaged, or has sub-word units; clusters that do not
            fit, see `read_clusters`.
    """
    begun = (workdir / "config.json").exists()
    both = config["init_from"] and config["init_words"] != "new"
    if clusters := config["output"]["clusters"]:
        if both:
            raise InputError(
                f"init_words=both adds words that output.clusters={clusters!r} does not have: leave"
                " one of them out"
            )
        if begun and not path_of(clusters).exists():
            kept = read_words(workdir)
            return kept if kept.same_words(own) else own
        return in_order(own, clusters)
    if not both:
        return own
    words = read_words(workdir if begun else path_of(config["init_from"]))
    if {type(own), type(words)} != {Vocabulary}:
        raise InputError(
            "init_words=both is for words, and sub-word units or ids of a tokenizer are complete:"
            " leave it out"
        )
    return own.with_words(words.words)


def finetuned(
    config: Mapping,
    state: State,
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    words: tuple[Vocabulary, Mesh],
) -> State:
    """The fresh `state` with the parameters of the run `config["init_from"]`, or the averages that
    its optimizer made.

    Rows of words that both vocabularies have are carried over by word; those of new words stay as
    they are, at random. A word whose vector lies in another band than before gets the vector of
    that band that is closest once both are projected. What a model composes from what the lexicon
    says of words has no rows, and is the same function of other words.

    words: the vocabulary of `model`, and the devices of `state`.

    Raises:
        InputError: as `check_fits` and `Run.open`.
    """
    vocabulary, mesh = words
    run = Run.open(path_of(config["init_from"]), config["init_checkpoint"])
    _check_same_model(config["init_from"], run.params, state.params)
    places = {word: place for place, word in enumerate(run.vocabulary.words)}
    taken = np.array([places.get(word, -1) for word in vocabulary.words])
    whole = sharding.on_host(run.params, run.mesh), sharding.on_host(state.params, mesh)
    old, new = map(traverse_util.flatten_dict, whole)
    made, moved = {}, [0]
    for path, array in new.items():
        if path[0] == "body":
            made[path] = old[path]
        elif path[-1] in BY_WORD and array.shape[:1] == (len(vocabulary),):
            made[path] = _rows(old[path], array, taken)
        elif path[-1] == HEAD:
            take = taken[: len(array)]
            made[path] = _rows(old[path], array, np.where(take < len(old[path]), take, -1))
        elif BY_BAND.fullmatch(path[-1]):
            if path not in made:
                bands, left = _by_band(old, new, path[:-1], taken)
                made |= bands
                moved.append(left)
        else:
            made[path] = old[path] if old[path].shape == array.shape else array
    by_word = any(_by_word(path) and a.ndim for path, a in new.items())
    hosts.say(
        _describe(f"{config['init_from']} after {run.step:,} updates", taken, by_word, max(moved))
    )
    shardings = traverse_util.flatten_dict(jax.tree.map(lambda a: a.sharding, state.params))
    params = traverse_util.unflatten_dict(
        {
            path: jax.make_array_from_callback(
                a.shape, shardings[path], lambda index, a=a: a[index]
            )
            for path, a in made.items()
        }
    )
    layout = jax.tree.map(lambda a: a.sharding, state.optimizer)
    return state._replace(
        params=params, optimizer=jax.jit(optimizer.init, out_shardings=layout)(params)
    )


def _check_same_model(origin, old, new):
    """Refuses parameters that differ by more than rows of words, and vectors of clusters of
    words.
    """
    old, new = (traverse_util.flatten_dict(params) for params in (old, new))
    for path in sorted({*old, *new}):
        there, here = (each[path].shape if path in each else None for each in (old, new))
        varies = _by_word(path) or (path[0] != "body" and path[-1] in BY_CLUSTER)
        if there != here and not (varies and None not in (there, here) and there[1:] == here[1:]):
            there, here = (
                "missing" if shape is None else f"of shape {shape}" for shape in (there, here)
            )
            raise InputError(
                f"init_from={origin} holds another model, whose parameter {'/'.join(path)} is"
                f" {there}, and here {here}: only the vocabulary may differ, so give the settings"
                " of that run for input, body and output"
            )


def _by_word(path):
    """Whether a parameter has rows of words. Biases of bodies have none."""
    return path[0] != "body" and bool(path[-1] in (*BY_WORD, HEAD) or BY_BAND.fullmatch(path[-1]))


def _rows(old, fresh, take):
    """`fresh` with the rows `take` of `old` where these are not -1."""
    known = take >= 0
    fresh[known] = old[take[known]]
    return fresh


def _by_band(old, new, module, take):
    """The tables of a module's bands, with the lengths of their rows where these are apart; and the
    words that changed bands.

    A row t of a table with projection P stands for the vector t P. In another band it becomes the r
    whose r P is closest, but for directions that P hardly has.
    """
    made, moved, first = {}, 0, 0
    tables = [old[*module, f"table_{k}"] for k in range(_bands(old, module))]
    begins = np.cumsum([0, *map(len, tables)])
    for i in range(len(tables)):
        fresh, norms = new[*module, f"table_{i}"], new.get((*module, f"norm_{i}"))
        of = take[first : first + len(fresh)]
        for k, table in enumerate(tables):
            here = np.flatnonzero((begins[k] <= of) & (of < begins[k + 1]))
            rows, lengths = table[of[here] - begins[k]], old.get((*module, f"norm_{k}"))
            lengths = None if lengths is None else lengths[of[here] - begins[k]]
            if k != i:
                moved += len(here)
                rows, lengths = _moved(
                    rows, lengths, *(old.get((*module, f"projection_{n}")) for n in (k, i))
                )
                # Bands without projections, as slices are: the vectors have nothing in common.
                if rows.shape[1] != fresh.shape[1]:
                    continue
            fresh[here] = rows
            if norms is not None:
                norms[here] = lengths
        made[*module, f"table_{i}"] = fresh
        made |= {} if norms is None else {(*module, f"norm_{i}"): norms}
        first += len(fresh)
    return made, moved


def _bands(arrays, module):
    return sum(path[:-1] == module and path[-1].startswith("table_") for path in arrays)


def _moved(rows, lengths, projection, into):
    if lengths is not None:
        rows = rows * (lengths / np.maximum(np.linalg.norm(rows, axis=1), 1e-30))[:, None]
    rows = rows if projection is None else rows @ projection
    rows = rows if into is None else rows @ np.linalg.pinv(into, rcond=SMALLEST)
    return rows, None if lengths is None else np.linalg.norm(rows, axis=1)


def _describe(origin, taken, by_word, moved):
    start = f"init_from    {origin}: "
    if not by_word:
        return (
            start + "all word vectors are composed, so new words start with a vector as others do"
        )
    new = int(np.sum(taken < 0))
    line = (
        f"{start}{len(taken) - new:,} of {len(taken):,} words carried over, {new:,} new ones start"
        " at random"
    )
    return line + (f"; {moved:,} have moved to another band" if moved else "")
