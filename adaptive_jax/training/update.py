"""One update: from a batch and the state before to the state after."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from adaptive_jax.model.gradients import make_gradients
from adaptive_jax.model.language_model import LanguageModel
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.optimizers import optim
from adaptive_jax.optimizers.schedules import PlateauState, ScheduleState
from adaptive_jax.parallel import sharding
from adaptive_jax.training.divergence import LARGEST_LOSS
from adaptive_jax.training.state import State


class UpdateOptions(NamedTuple):
    """Options of an update.

    Attributes:
        skip_from: leave the update out if its loss is this many nats a token or more, or its loss
            or gradient is not finite; None: never.
        window: multiply the learning rate by the tokens of a row over this number; None: do not.
        stored: use the state's tables as they are. Otherwise words are encoded anew, and the
            state's tables, if any, are replaced.
    """

    skip_from: float | None = None
    window: int | None = None
    stored: bool = False

    @classmethod
    def from_config(cls, config: Mapping) -> "UpdateOptions":
        """The options that a config asks for."""
        batches = config["batches"]
        window = batches["sequence_length"] if batches["layout"] == "streams" else None
        return cls(LARGEST_LOSS if config["divergence"] == "skip" else None, window)


NO_OPTIONS = UpdateOptions()


def make_update(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    seed: int,
    layout: State,
    options: UpdateOptions = NO_OPTIONS,
) -> Callable:
    """Compiles one update.

    optimizer: of `optim.from_config`, or another with a field `learning_rate` in its state.
    layout: shapes and shardings of the state, see `shape_of_state`.

    Returns:
        `update(state, lexicon, batch) -> (state, metrics)`. `batch` is a `Batch` of `[microbatches,
        rows, time]`; gradients are summed over all tokens of the update and divided once by the sum
        of their weights. The given state is donated. `metrics` are scalars: `nll` (plain, nats a
        token, dropout on), `loss` (with regularisation and penalties), `learning_rate`,
        `gradient_norm` (before clipping) and `tokens` (the sum of weights); and `gradient_squares`,
        `[parameters]`, the sum of the squared gradient of each, in the order of `jax.tree.leaves`.
        With `skip_from` also `skipped`.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    gradients_of = make_gradients(model, mesh, seed, shares_tables=bool(layout.tables))

    def update(state: State, lexicon, batch: Batch):
        stored = state.tables if options.stored else {}
        gradients, carry, sums, tables = gradients_of(
            state.params, lexicon, state.step, batch, state.carry, stored
        )
        gradients = jax.tree.map(lambda g: g / sums.divisor, gradients)
        scale = batch.inputs.shape[-1] / options.window if options.window else 1.0
        changes, optimizer_state = optimizer.update(
            gradients, state.optimizer, state.params, scale=scale, stored=options.stored
        )
        squares = [jnp.sum(jnp.square(a.astype(jnp.float32))) for a in jax.tree.leaves(gradients)]
        metrics = {
            "nll": sums.nll / sums.divisor,
            "loss": sums.loss / sums.divisor,
            "learning_rate": optim.learning_rate(optimizer_state),
            "gradient_norm": jnp.sqrt(sum(squares)),
            "tokens": sums.tokens,
            "gradient_squares": jnp.stack(squares),
        }
        params = optax.apply_updates(state.params, changes)
        after = State(state.step + 1, params, optimizer_state, carry, tables)
        if options.skip_from is not None:
            finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["gradient_norm"])
            keep = finite & (metrics["nll"] < options.skip_from)
            # The next window reads the carry, which depends on the text; tables are those of the
            # parameters before the update.
            carry = jax.tree.map(lambda a: jnp.where(jnp.isfinite(a), a, 0), carry)
            after = _unless_skipped(keep, after, state)
            after = after._replace(step=state.step + 1, carry=carry, tables=tables)
            metrics["skipped"] = ~keep
        return after, metrics

    shardings = jax.tree.map(lambda a: a.sharding, layout)
    replicated, by_rows = sharding.replicated(mesh), NamedSharding(mesh, sharding.batch_spec(1))
    return jax.jit(
        update,
        donate_argnums=0,
        in_shardings=(shardings, replicated, by_rows),
        out_shardings=(shardings, replicated),
    )


def _unless_skipped(keep, after, before):
    """The state after an update that is kept; otherwise the one before, except for schedules, which
    count skipped updates, too.
    """

    def is_schedule(state):
        return isinstance(state, ScheduleState | PlateauState)

    def either(new, old):
        return new if is_schedule(new) else jnp.where(keep, new, old)

    return jax.tree.map(either, after, before, is_leaf=is_schedule)
