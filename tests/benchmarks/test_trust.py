"""The table of losses that pass the check: one right, one wrong, one that is not installed."""

from types import SimpleNamespace

import jax.numpy as jnp

from adaptive_jax import testing
from benchmarks import full_softmax, trust

NAMES = "one token", "float16", "all tokens ignored", "soft cap"


def faulty(hidden, table, targets, ignore_index=None):
    """Raises in half precision, is NaN without tokens, and half the loss elsewhere."""
    if hidden.dtype == jnp.float16:
        raise TypeError("no kernel")
    count = (targets >= 0).sum()
    return full_softmax.of_all_logits(hidden, table, targets) / 2 * (count / count)


def test_the_table(monkeypatch, capsys):
    """A fault shows in its case and says what it is; an argument that is not there is no fault."""
    cases = {name: testing.CASES[name] for name in NAMES}
    for module in testing, trust:
        monkeypatch.setattr(module, "CASES", cases)
    peers = {"right": full_softmax.of_all_logits, "faulty": faulty, "absent": faulty}
    monkeypatch.setattr(trust, "PEERS", peers)
    monkeypatch.setattr(trust, "PACKAGES", {"absent": "no_such_package"})
    trust.main(SimpleNamespace(skip=[], json=None))
    printed = capsys.readouterr().out
    assert "absent is passed over: it is not installed\n" in printed
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert rows[0] == "| case | right | faulty |"
    assert rows[2:4] == ["| one token | yes | 5e-01, 5e-01 |", "| float16 | yes | error |"]
    assert rows[4:] == ["| all tokens ignored | - | NaN |", "| soft cap | - | - |"]
    assert "\nfaulty, float16: TypeError: no kernel\n" in printed
