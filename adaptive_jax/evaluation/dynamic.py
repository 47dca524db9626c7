"""Dynamic evaluation: the parameters follow the text that has been scored (Krause, Kahembwe, Murray
& Renals 2018).

Segment after segment is scored, and then the parameters θ take a step along the gradient g of the
segment's mean loss, with decay towards the trained parameters θ_g:

    sgd   θ ← θ − η g                 + λ (θ_g − θ)
    rms   θ ← θ − η g / (√MS_g + ε)   + λ (θ_g − θ) ⊙ min(RMS_norm, 1 / λ)

    MS_g      the mean of g² over segments of the train split, for every parameter
    RMS_norm  √MS_g over its mean over all parameters

A segment is a batch of `window − context` tokens in each of `rows` rows. No dropout is drawn, and
losses have no regularisation. Loss and gradient are those of training otherwise; so sampled outputs
score all words and learn from samples.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaptive_jax.data.batches.windows import WindowBatch, Windows, windows
from adaptive_jax.errors import InputError, check_at_least, check_known
from adaptive_jax.evaluation.runs import Run
from adaptive_jax.evaluation.scoring import (
    PLAIN,
    Progress,
    finite,
    initial_carry,
    make_scorer,
    scored_columns,
)
from adaptive_jax.model.gradients import make_gradients
from adaptive_jax.model.language_model import build
from adaptive_jax.parallel import sharding

RULES = {"sgd": 0.1, "rms": 5e-5}  # and their default rates
CURE = {
    "sgd": "",
    "rms": (
        ", or raise --epsilon or --statistics, which hold steps small where the train split gave no"
        " gradient"
    ),
}
PLACES = 20  # of the train split, from which the statistics come
NOISE = {"weight_drop", "label_smoothing", "z_loss", "ar", "tar"}  # besides every kind of dropout


class Dynamic(NamedTuple):
    """The options of --method=dynamic.

    Attributes:
        rule: "sgd" or "rms".
        rate: η; None: 0.1 of sgd, 0.00005 of rms. Choose it on the validation split.
        decay: λ, 0 or more and below 1.
        epsilon: ε of rms.
        statistics: segments of the train split from which rms takes MS_g.
    """

    rule: str = "rms"
    rate: float | None = None
    decay: float = 0.002
    epsilon: float = 1e-5
    statistics: int = 2_000

    def check(self) -> None:
        """Raises InputError for values out of range."""
        check_known(f"rule={self.rule!r}", self.rule, RULES)
        check_at_least(1, statistics=self.statistics)
        rate = self.rate is None or self.rate >= 0
        for name, good in (
            ("rate", rate),
            ("decay", 0 <= self.decay < 1),
            ("epsilon", self.epsilon > 0),
        ):
            if not good:
                what = {
                    "rate": "0 or more",
                    "decay": "0 or more and below 1",
                    "epsilon": "above 0",
                }[name]
                raise InputError(f"{name}={getattr(self, name)} must be {what}")
        for key in ("epsilon", "statistics") if self.rule != "rms" else ():
            if getattr(self, key) != Dynamic._field_defaults[key]:
                raise InputError(
                    f"{key} means nothing to rule={self.rule!r}: leave it out, or use rule='rms'"
                )


def dynamic(
    run: Run,
    ids: np.ndarray,
    settings: Windows,
    options: Dynamic,
    train: Callable[[], np.ndarray],
    progress: Progress,
) -> np.ndarray:
    """Scores every token of a split once, as `scoring.plain`, with parameters that follow the text;
    `run` keeps its own.

    train: gives the ids of the train split, for the rule rms.

    Raises:
        InputError: as `windows`, or the parameters diverged.
    """
    settings = settings._replace(multiple=run.mesh.size)
    model = build(without_noise(run.config), len(run.vocabulary))
    squares, nll = None, np.full(len(ids), np.nan, np.float32)
    if options.rule == "rms":
        squares = mean_squares(
            run, model, _sample(train(), settings, options.statistics), settings, progress
        )
    step = _make_step(model, run.mesh, settings.unscored)
    rate = RULES[options.rule] if options.rate is None else options.rate
    numbers = {"rate": rate, "decay": options.decay, "epsilon": options.epsilon}
    params, carry = jax.jit(functools.partial(jax.tree.map, jnp.copy))(run.params), None
    count, batches = windows(ids, run.vocabulary.eos, settings)
    for batch, at in progress(batches, count):
        carry = _first_carry(model, run.mesh, settings, batch) if carry is None else carry
        given = sharding.put_batch(run.mesh, batch)
        losses, params, carry = step(
            params, (run.params, squares, numbers), run.lexicon, given, carry
        )
        losses = jax.device_get(losses)
        nll[at] = finite(losses[scored_columns(batch, losses.shape[1])])
        if np.isinf(nll[at]).any():
            raise InputError(
                f"--method=dynamic diverged at token {at[0]:,}: lower --rate" + CURE[options.rule]
            )
    return nll


def mean_squares(run: Run, model, ids: np.ndarray, settings: Windows, progress: Progress) -> dict:
    """MS_g: for every parameter the mean over the segments of a text of its squared gradient."""
    add = _make_sum(model, run.mesh)
    count, batches = windows(ids, run.vocabulary.eos, settings)
    total, carry = jax.jit(functools.partial(jax.tree.map, jnp.zeros_like))(run.params), None
    for batch, _ in progress(batches, count):
        carry = _first_carry(model, run.mesh, settings, batch) if carry is None else carry
        total, carry = add(
            run.params, total, run.lexicon, sharding.put_batch(run.mesh, batch), carry
        )
    return jax.jit(lambda total: jax.tree.map(lambda a: a / count, total))(total)


def without_noise(config: Mapping) -> dict:
    """The config without dropout, penalties and regularised losses."""
    quiet = copy.deepcopy(dict(config))

    def hush(group):
        for key, value in group.items():
            if isinstance(value, dict):
                hush(value)
            elif key in NOISE or key.endswith("dropout"):
                group[key] = 0.0

    for name in ("input", "body", "output"):
        hush(quiet[name])
    return quiet


@functools.lru_cache(maxsize=2)
def _make_sum(model, mesh):
    """Returns `add(params, total, lexicon, batch, carry) -> (total, carry)`, which adds squared
    gradients.
    """
    gradients = make_gradients(model, mesh, 0)

    def add(params, total, lexicon, given, carry):
        gradient, carry = _mean_gradient(gradients, params, lexicon, given, carry)
        return jax.tree.map(lambda total, g: total + jnp.square(g), total, gradient), carry

    return jax.jit(add, donate_argnums=1)


@functools.lru_cache(maxsize=2)
def _make_step(model, mesh, unscored):
    """Returns `step(params, rule, lexicon, batch, carry) -> (nll, params, carry)`.

    rule: the trained parameters, MS_g or None for sgd, and the rate, decay and epsilon.
    """
    words = model.input.vocabulary_size
    scorer, gradients = (
        make_scorer(model, mesh, unscored, (words, words, PLAIN)),
        make_gradients(model, mesh, 0),
    )

    def step(params, rule, lexicon, given, carry):
        trained, squares, numbers = rule
        rate, decay, epsilon = (numbers[name] for name in ("rate", "decay", "epsilon"))
        (nll, _), after = scorer(params, lexicon, {}, given, carry)
        gradient, _ = _mean_gradient(gradients, params, lexicon, given, carry)
        if squares is None:
            return (
                nll,
                jax.tree.map(
                    lambda p, t, g: p - rate * g + decay * (t - p), params, trained, gradient
                ),
                after,
            )
        roots = jax.tree.map(jnp.sqrt, squares)
        mean = sum(map(jnp.sum, jax.tree.leaves(roots))) / sum(
            a.size for a in jax.tree.leaves(roots)
        )

        def move(p, t, g, root):
            return p - rate * g / (root + epsilon) + jnp.minimum(decay * root / mean, 1.0) * (t - p)

        return nll, jax.tree.map(move, params, trained, gradient, roots), after

    return jax.jit(step, donate_argnums=0)


def _mean_gradient(gradients, params, lexicon, given: WindowBatch, carry):
    """The gradient of the mean loss of a batch, and the next carry."""
    batch, carry = jax.tree.map(lambda a: a[None], (given.batch, carry))
    gradient, carry, sums, _ = gradients(params, lexicon, jnp.int32(0), batch, carry)
    return jax.tree.map(lambda g: g / sums.tokens, gradient), jax.tree.map(lambda a: a[0], carry)


def _first_carry(model, mesh, settings, batch):
    return initial_carry(model, mesh, len(batch.first))() if settings.layout == "streams" else ()


def _sample(ids, settings, segments):
    """The ids of about so many segments, from places all over a text."""
    tokens = segments * settings.rows * (settings.window - settings.unscored)
    if tokens >= len(ids):
        return np.asarray(ids)
    each = -(-tokens // PLACES)
    return np.concatenate(
        [ids[begin : begin + each] for begin in np.linspace(0, len(ids) - each, PLACES).astype(int)]
    )
