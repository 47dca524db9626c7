"""The benchmark of full softmaxes: its peers agree, and one that is wrong or missing is said to
be.
"""

import jax.numpy as jnp

from benchmarks import full_softmax


def test_peers(monkeypatch, capsys):
    """Peers for JAX agree with float64; one that leaves out the words behind the last whole
    block of 1,024 is shown as wrong.
    """

    def blocks(hidden, table, targets):
        logits = hidden @ table.T
        even = logits[:, : len(table) // 1024 * 1024]
        return jnp.mean(
            jnp.log(jnp.exp(even).sum(axis=1))
            - jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        )

    def absent(hidden, table, targets):
        raise ImportError("no such package")

    def broken(hidden, table, targets):
        raise RuntimeError("no such kernel\nTraceback of many lines")

    peers = {
        name: full_softmax.JAX[name] for name in ("linear_cross_entropy", "optax", "optax chunked")
    }
    monkeypatch.setattr(
        full_softmax, "JAX", peers | {"blocks": blocks, "absent": absent, "broken": broken}
    )
    rows = full_softmax.measure(16, 8, 2_100, "float32", 1, ["torch", "apple"])
    assert {row["peer"]: row["wrong"] for row in rows} == dict.fromkeys(peers, False) | {
        "blocks": True
    }
    assert all(row["seconds"] > 0 for row in rows) and rows[0]["times_ours"] == 1
    printed = capsys.readouterr().out
    assert (
        "absent is passed over: no such package\nbroken is passed over: no such kernel\n" in printed
    )
    assert printed.count("WRONG") == 1
