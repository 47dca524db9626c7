"""One update: from a batch and the state before to the state after."""

from collections.abc import Callable

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from adaptive_jax.batch import Batch
from adaptive_jax.devices import sharding
from adaptive_jax.gradients import make_gradients
from adaptive_jax.model import LanguageModel
from adaptive_jax.training.optim import Optimizer
from adaptive_jax.training.state import State


def make_update(model: LanguageModel, optimizer: Optimizer, mesh: Mesh, seed: int, layout: State) -> Callable:
    """Compiles one update.

    layout: shapes and shardings of the state, see `shape_of_state`.

    Returns:
        `update(state, lexicon, batch) -> (state, metrics)`. `batch` is a `Batch` of `[microbatches, rows, time]`; gradients are
        summed over all tokens of the update and divided once by the sum of their weights. The given state is donated. `metrics`
        are scalars: `nll` (plain, nats a token, dropout on), `loss` (with regularisation and penalties), `learning_rate`,
        `gradient_norm` (before clipping) and `tokens` (the sum of weights).
    """
    gradients_of = make_gradients(model, mesh, seed)

    def update(state: State, lexicon, batch: Batch):
        gradients, carry, sums = gradients_of(state.params, lexicon, state.step, batch, state.carry)
        gradients = jax.tree.map(lambda g: g / sums.tokens, gradients)
        changes, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        metrics = {
            "nll": sums.nll / sums.tokens,
            "loss": sums.loss / sums.tokens,
            "learning_rate": optimizer.rate(state.optimizer, state.step),
            "gradient_norm": optax.global_norm(gradients),
            "tokens": sums.tokens,
        }
        return State(state.step + 1, optax.apply_updates(state.params, changes), optimizer_state, carry), metrics

    shardings = jax.tree.map(lambda a: a.sharding, layout)
    whole, by_rows = sharding.replicated(mesh), NamedSharding(mesh, sharding.batch_spec(1))
    return jax.jit(update, donate_argnums=0, in_shardings=(shardings, whole, by_rows), out_shardings=(shardings, whole))
