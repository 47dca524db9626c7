"""An update of a table by the rows that a batch looks up, beside one by the whole table's gradient.

    python -m benchmarks.row_sparse [--rows=100000,1000000,10000000] [--width=32] [--ids=4096]
        [--repeats=7]

Both look up ids that follow Zipf's law, take the gradient of a loss of what they find, and update a
table and a state that are donated; they take turns on the same arrays. A line for each: median and
least milliseconds; `moved`, the MB of `bytes_moved`; `temp`, the MB that the compiled program needs
beside its arguments; and its time over that of `row_sparse`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from adaptive_jax import update_rows
from adaptive_jax.config import commands
from adaptive_jax.errors import check_at_least
from benchmarks.timing import machine, timed, whole_numbers

OPTIMIZERS = {"sgd": optax.sgd(0.1), "adagrad": optax.adagrad(0.1)}


def dense(optimizer, table, state, ids):
    """The usual update, by a gradient as large as the table."""
    gradient = jax.grad(lambda table: 0.5 * jnp.sum(table[ids] ** 2))(table)
    changes, state = optimizer.update(gradient, state, table)
    return optax.apply_updates(table, changes), state


def row_sparse(optimizer, table, state, ids):
    """The update of the rows that `ids` name."""
    gradient = jax.grad(lambda vectors: 0.5 * jnp.sum(vectors**2))(table[ids])
    return update_rows(optimizer, table, state, ids, gradient)


def bytes_moved(rows: int, ids: int, width: int, kept: int) -> int:
    """Bytes that an update of so many rows must read and write in float32.

    The lookup reads a row and writes a vector and its gradient for each id. The gradient of rows is
    filled with 0, gets each id's share, and is read; the rows, and the `kept` arrays of the
    optimizer's state, are read and written.
    """
    return 4 * width * (6 * ids + rows * (4 + 2 * kept))


def measure(rows: int, width: int, count: int, repeats: int) -> None:
    """Prints a line for each optimizer and peer."""
    ids = (rows ** np.random.default_rng(0).random(count)).astype(np.int32) - 1
    touched = {"row_sparse": len(np.unique(ids)), "dense": rows}
    print(f"\n{rows:,} rows of {width}; {count:,} ids of {touched['row_sparse']:,} rows")
    for name, optimizer in OPTIMIZERS.items():
        held = [jnp.ones((rows, width))]
        held.append(jax.jit(optimizer.init)(*held))
        kept, peers, temp = (name == "adagrad"), {}, {}
        for peer in row_sparse, dense:
            program = jax.jit(peer, static_argnums=0, donate_argnums=(1, 2))
            program = program.lower(optimizer, *held, jnp.asarray(ids)).compile()
            temp[peer.__name__] = program.memory_analysis().temp_size_in_bytes / 1e6

            def run(program=program, held=held):
                held[:] = jax.block_until_ready(program(*held, ids))

            peers[peer.__name__] = run
        for row in (measured := timed(peers, repeats)):
            peer, least = row["peer"], row["fastest"] * 1e3
            moved = bytes_moved(touched[peer], count, width, kept) / 1e6
            times = row["seconds"] / measured[0]["seconds"]
            print(
                f"{name:8} {peer:11} {row['seconds'] * 1e3:9.2f} ms {least:9.2f}   moved"
                f" {moved:8,.1f}   temp {temp[peer]:8,.1f}   {times:7.1f} times",
                flush=True,
            )


def main(settings):
    """Measures every size."""
    check_at_least(1, width=settings.width, ids=settings.ids, repeats=settings.repeats)
    print(f"{machine()}, median of {settings.repeats}")
    for rows in whole_numbers("--rows", settings.rows):
        measure(rows, settings.width, settings.ids, settings.repeats)


if __name__ == "__main__":
    flags.DEFINE_list("rows", ["100000", "1000000", "10000000"], "Rows of the table.")
    flags.DEFINE_integer("width", 32, "Numbers of a row.")
    flags.DEFINE_integer("ids", 4096, "Ids of a batch.")
    flags.DEFINE_integer("repeats", 7, "Timed runs of each peer.")
    commands.run(lambda: main(flags.FLAGS))
