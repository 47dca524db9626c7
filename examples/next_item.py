"""The next of a million items: a recommender whose update costs as much as its batch, not as its
table.

    python examples/next_item.py                     # a million items, 4,000 updates
    python examples/next_item.py --items=10_000_000

Sessions are made up: items fall into groups, a group is followed by one of three, and within a
group some items are popular and most are rare (Zipf's law). A GRU reads a session, and a sampled
softmax learns the item that comes next. Input and output share one table, of which an update
changes only the rows of items in the sessions and candidates in the sample. At the end it prints
the exact nats an item, and how often the next item is among the ten most probable, for the model
and for a count of popular items.
"""

import argparse
import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from adaptive_jax import linear_cross_entropy, update_rows
from adaptive_jax.outputs.sampled import log_uniform, log_uniform_chance

WIDTH = 64
ROWS, TIME = 128, 8  # a batch has ROWS sessions of TIME items, and the item after each of them
GROUPS = 100
SAMPLES = 1_024  # candidates of an update, shared by all its items


class Source:
    """Sessions of a random chain of groups; an item's id is `rank * GROUPS + group`, so popularity
    falls with the id, as the distribution of the sample expects.
    """

    def __init__(self, items: int):
        rng = np.random.default_rng(0)
        share = 1 / np.arange(1, items // GROUPS + 1)
        self.shares = share / share.sum()
        self.edges = np.cumsum(self.shares)
        self.followers = rng.permuted(np.tile(np.arange(GROUPS), (3, 1)), axis=1).T

    def sessions(self, rows: int, seed: int) -> np.ndarray:
        """Items `[rows, TIME + 1]`."""
        rng = np.random.default_rng(seed)
        groups = [rng.integers(GROUPS, size=rows)]
        for _ in range(TIME):
            groups.append(self.followers[groups[-1], rng.integers(3, size=rows)])
        ranks = np.searchsorted(self.edges, rng.random((rows, TIME + 1)))
        ranks = np.minimum(ranks, len(self.edges) - 1)
        return (ranks * GROUPS + np.stack(groups, axis=1)).astype(np.int32)

    def best(self) -> tuple[float, float]:
        """Nats and recall of a model that knows the chain, except groups that follow twice."""
        nats = math.log(3) - np.sum(self.shares * np.log(self.shares))
        return nats, np.sort(np.repeat(self.shares, 3) / 3)[-10:].sum()


class Reader(nn.Module):
    """A GRU over the vectors of a session."""

    @nn.compact
    def __call__(self, vectors):
        return nn.Dense(WIDTH)(nn.RNN(nn.GRUCell(WIDTH))(vectors))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--updates", type=int, default=4_000)
    parser.add_argument("--rate", type=float, default=0.3, help="of the table")
    arguments = parser.parse_args()
    if arguments.items < GROUPS:
        parser.error(f"--items must be at least {GROUPS}, one a group, got {arguments.items}")
    items, source = arguments.items, Source(arguments.items)
    model, of_table, of_model = Reader(), optax.adagrad(arguments.rate), optax.adam(1e-3)

    @jax.jit
    def start():
        vectors = WIDTH**-0.5 * jax.random.normal(jax.random.key(0), (items, WIDTH))
        table = {"vectors": vectors, "bias": jnp.zeros(items)}
        params = model.init(jax.random.key(1), jnp.zeros((1, TIME, WIDTH)))
        return table, of_table.init(table), params, of_model.init(params)

    def loss_of(looked_up, params, targets, candidates):
        """Nats of all targets, from the rows of the sessions, targets and candidates."""
        parts = jax.tree.map(lambda a: jnp.split(a, (targets.size, 2 * targets.size)), looked_up)
        inputs, of_targets, of_candidates = parts["vectors"]
        _, target_bias, bias = parts["bias"]
        hidden = model.apply(params, inputs.reshape(*targets.shape, WIDTH)).reshape(-1, WIDTH)
        scores = jnp.sum(hidden * of_targets, axis=1) + target_bias
        # Sampled softmax: divide each candidate by its expected number of occurrences.
        expected = math.log(SAMPLES) + log_uniform_chance(candidates, items)
        logits = hidden @ of_candidates.T + (bias - expected)[None]
        hit = targets.reshape(-1, 1) == candidates[None]
        normaliser = jax.nn.logsumexp(jnp.where(hit, -1e30, logits), axis=1)
        return jnp.sum(jax.nn.softplus(normaliser - scores))

    # Donated arguments let the update change the table in place.
    @functools.partial(jax.jit, donate_argnums=(0, 1, 2, 3))
    def update(table, table_state, params, state, sessions, key):
        inputs, targets = sessions[:, :-1], sessions[:, 1:]
        candidates = log_uniform(key, items, SAMPLES)
        ids = jnp.concatenate([inputs.ravel(), targets.ravel(), candidates])
        looked_up = jax.tree.map(lambda a: a[ids], table)
        loss, (of_rows, gradient) = jax.value_and_grad(loss_of, (0, 1))(
            looked_up, params, targets, candidates
        )
        table, table_state = update_rows(of_table, table, table_state, ids, of_rows)
        changes, state = of_model.update(gradient, state)
        params = optax.apply_updates(params, changes)
        return table, table_state, params, state, loss / targets.size

    @jax.jit
    def score(table, params, sessions):
        """Nats an item in the softmax over all items, and recall among the ten most probable."""
        hidden, targets = model.apply(params, table["vectors"][sessions[:, :-1]]), sessions[:, 1:]
        bias, reports = table["bias"], ("top_k",)
        nats, report = linear_cross_entropy(
            hidden, table["vectors"], targets, bias=bias, reports=reports, top_k=10
        )
        return nats, (report.top_k.words == targets[..., None]).any(axis=-1).mean()

    state, begin = start(), time.perf_counter()
    counts = np.ones(items)  # one more than seen, so that no item has probability 0
    for step in range(1, arguments.updates + 1):
        sessions = source.sessions(ROWS, seed=step)
        np.add.at(counts, sessions[:, 1:], 1)
        *state, loss = update(*state, sessions, jax.random.key(step))
        if step % max(1, arguments.updates // 5) == 0:
            took = time.perf_counter() - begin
            print(f"update {step}: loss {loss:.3f} after {took:.0f} s", flush=True)
    held_out = source.sessions(4 * ROWS, seed=arguments.updates + 1)
    targets, popular = held_out[:, 1:], np.argsort(-counts)[:10]
    nats = -np.log(counts / counts.sum())[targets].mean()
    rows = {
        "model": score(state[0], state[2], held_out),
        "popularity": (nats, np.isin(targets, popular).mean()),
        "the source itself": source.best(),
    }
    for name, (nats, recall) in rows.items():
        print(f"{name:18} {nats:6.3f} nats an item   recall@10 {recall:.4f}")


if __name__ == "__main__":
    main()
