"""Dynamic evaluation: the parameters adapt to the text as it is scored (Krause, Kahembwe, Murray &
Renals 2018).

After a segment is scored, the parameters θ take a step along the gradient g of its mean loss, with
decay towards the trained parameters θ_g:

    sgd   θ ← θ − η g                 + λ (θ_g − θ)
    rms   θ ← θ − η g / (√MS_g + ε)   + λ (θ_g − θ) ⊙ min(RMS_norm, 1 / λ)

    MS_g      the mean of g² over segments of the train split, for every parameter
    RMS_norm  √MS_g over its mean over all parameters

A segment is a batch of `window − context` tokens in each of `rows` rows. Gradients are those of
the evaluated loss: no dropout, penalties or regularisation, and sampled outputs use all words.
"""

import functools
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from adaptive_jax.config.options import Option, Share
from adaptive_jax.data.batches.windows import WindowBatch, Windows, windows
from adaptive_jax.errors import InputError
from adaptive_jax.model.gradients import make_gradients
from adaptive_jax.parallel import sharding
from adaptive_jax.runs.run import Run
from adaptive_jax.scores.scoring import Evaluation, Progress, fetch, first_carry, make_scorer

RULES = {"sgd": 0.1, "rms": 5e-5}  # and their default rates
CURE = {"sgd": "lower --rate", "rms": "lower --rate, or raise --epsilon or --statistics"}
STRETCHES = 20  # number of places in the train split that the statistics are taken from


class Dynamic(NamedTuple):
    """The options of --method=dynamic.

    Attributes:
        rule: rule of the update.
        rate: learning rate η, by default 0.00005 for rms and 0.1 for sgd.
        decay: decay towards the trained parameters.
        epsilon: ε of rms.
        statistics: number of full segments of the train split from which rms computes MS_g.
    """

    rule: Annotated[str, Option(among=RULES)] = "rms"
    rate: Annotated[float | None, Option(within="[0, inf)")] = None
    decay: Share = 0.002
    epsilon: Annotated[float, Option(within="(0, inf)", only=("rule", "rms"))] = 1e-5
    statistics: Annotated[int, Option(within="[1, inf)", only=("rule", "rms"))] = 2_000


def score(job: Evaluation, options: Dynamic) -> Iterator[tuple[dict, np.ndarray]]:
    """Yields the scores of a split by parameters that adapt to it."""
    yield {}, job.with_uniform(dynamic(job, options))


def dynamic(job: Evaluation, options: Dynamic) -> np.ndarray:
    """Scores every token of a split once, as `score_split`, with parameters that adapt to the
    text; those of `job.run` do not change.

    Raises:
        InputError: as `windows`, or the parameters diverged.
    """
    run, ids, progress = job.run, job.ids, job.progress("scoring")
    settings = job.windows._replace(multiple=run.mesh.size, in_text_order=True)
    squares, nll = None, np.full(len(ids), np.nan, np.float32)
    if options.rule == "rms":
        text = _sample(job.train(None), settings, options.statistics)
        squares = mean_squares(run, text, settings, progress)
    step = _make_step(run.model, run.mesh, settings.context_columns)
    rate = RULES[options.rule] if options.rate is None else options.rate
    numbers = rate, options.decay, options.epsilon
    params, carry = jax.jit(functools.partial(jax.tree.map, jnp.copy))(run.params), None
    count, batches = windows(ids, run.vocabulary.eos, settings)
    for batch, positions in progress(batches, count):
        if carry is None:
            carry = first_carry(run, settings.layout, len(batch.first))
        on_devices = sharding.put_batch(run.mesh, batch)
        results, params, carry = step(
            params, (run.params, squares, numbers), run.lexicon, on_devices, carry
        )
        nll[positions] = fetch(results, batch, positions).nll
        if np.isinf(nll[positions]).any():
            raise InputError(
                f"--method=dynamic diverged at token {positions[0]:,}: {CURE[options.rule]}"
            )
    return nll


def mean_squares(run: Run, ids: np.ndarray, settings: Windows, progress: Progress) -> dict:
    """MS_g: for every parameter, its squared gradient averaged over the segments of a text."""
    add, carry = _make_sum(run.model, run.mesh), None
    count, batches = windows(ids, run.vocabulary.eos, settings)
    # Sharded as `add` returns it, or `add` would be compiled twice
    specs = sharding.parameter_specs(run.params, run.mesh, run.model)
    shardings = jax.tree.map(lambda _, spec: NamedSharding(run.mesh, spec), run.params, specs)
    zeros = jax.jit(functools.partial(jax.tree.map, jnp.zeros_like), out_shardings=shardings)
    total = zeros(run.params)
    for batch, _ in progress(batches, count):
        if carry is None:
            carry = first_carry(run, settings.layout, len(batch.first))
        on_devices = sharding.put_batch(run.mesh, batch)
        total, carry = add(run.params, total, run.lexicon, on_devices, carry)
        # Collectives of hundreds of waiting programs block each other on several CPU devices.
        jax.block_until_ready(total)
    return jax.jit(lambda total: jax.tree.map(lambda a: a / count, total))(total)


@functools.lru_cache(maxsize=2)
def _make_sum(model, mesh):
    """Returns `add(params, total, lexicon, batch, carry) -> (total, carry)`, which adds squared
    gradients.
    """
    gradients = make_gradients(model, mesh, 0, train=False)

    def add(params, total, lexicon, batch, carry):
        gradient, carry = _mean_gradient(gradients, params, lexicon, batch, carry)
        return jax.tree.map(lambda total, g: total + jnp.square(g), total, gradient), carry

    return jax.jit(add, donate_argnums=1)


@functools.lru_cache(maxsize=2)
def _make_step(model, mesh, unscored):
    """Returns `step(params, rule, lexicon, batch, carry) -> (results, params, carry)`, see
    `fetch`.

    rule: the trained parameters, MS_g or None for sgd, and the rate, decay and epsilon.
    """
    words = model.input.vocabulary_size
    scorer = make_scorer(model, mesh, unscored, words, words)
    gradients = make_gradients(model, mesh, 0, train=False)

    def step(params, rule, lexicon, batch, carry):
        trained, squares, (rate, decay, epsilon) = rule
        results, after = scorer(params, lexicon, {}, batch, carry)
        gradient, _ = _mean_gradient(gradients, params, lexicon, batch, carry)

        def sgd(p, t, g):
            return p - rate * g + decay * (t - p)

        if squares is None:
            return results, jax.tree.map(sgd, params, trained, gradient), after
        roots = jax.tree.map(jnp.sqrt, squares)
        leaves = jax.tree.leaves(roots)
        mean = sum(map(jnp.sum, leaves)) / sum(root.size for root in leaves)

        def rms(p, t, g, root):
            return p - rate * g / (root + epsilon) + jnp.minimum(decay * root / mean, 1.0) * (t - p)

        return results, jax.tree.map(rms, params, trained, gradient, roots), after

    return jax.jit(step, donate_argnums=0)


def _mean_gradient(gradients, params, lexicon, window: WindowBatch, carry):
    """The gradient of the mean loss of a batch, and the next carry."""
    batch, carry = jax.tree.map(lambda a: a[None], (window.batch, carry))
    gradient, carry, sums, _ = gradients(params, lexicon, jnp.int32(0), batch, carry, {})
    return jax.tree.map(lambda g: g / sums.divisor, gradient), jax.tree.map(lambda a: a[0], carry)


def _sample(ids, settings, segments):
    """Returns the ids of about `segments` segments, spread evenly over a text."""
    tokens = segments * settings.rows * (settings.window - settings.context_columns)
    if tokens >= len(ids):
        return np.asarray(ids)
    length = -(-tokens // STRETCHES)
    begins = np.linspace(0, len(ids) - length, STRETCHES).astype(int)
    return np.concatenate([ids[begin : begin + length] for begin in begins])
