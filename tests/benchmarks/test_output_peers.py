"""The other outputs as peers of the benchmark of the output layer."""

import math

import jax
import jax.numpy as jnp

from benchmarks import output_peers, outputs


def test_other_outputs_are_peers():
    """Each is a loss of hidden states and parameters: of random vectors near log V, but for
    nce, which sums over its noise.
    """
    case = outputs.Case(64, 210, (40, 90), tokens=16)
    hidden, targets, *_ = jax.tree.map(jnp.asarray, outputs.arguments(case))
    peers = output_peers.peers(case, hidden, targets)
    losses = jax.jit(lambda: {name: loss(*values) / 16 for name, (loss, values) in peers.items()})()
    assert [name.split()[0] for name in peers] == [
        "hierarchical",
        "hierarchical",
        "sampled",
        "nce",
        "D-softmax",
        "D-softmax*",
    ]
    assert all(4 < loss < 8 for name, loss in losses.items() if not name.startswith("nce")), losses
    assert all(0 < loss < math.inf for loss in losses.values()), losses
