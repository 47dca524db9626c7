"""The check of cross-entropy losses: it passes right ones and names the case of each fault."""

import json
import re

import jax
import jax.numpy as jnp
import pytest

from adaptive_jax import linear_cross_entropy
from adaptive_jax.testing import CASES, check_cross_entropy, cross_entropy

DEVICES = [name for name, case in CASES.items() if case.specs]
FAULTS = {
    "": [],
    "the mean is over all tokens": ["ignored tokens"],
    "NaN without tokens": ["all tokens ignored"],
    "sums in half precision": ["bfloat16", "float16"],
    "soft cap without derivative": ["soft cap"],
    "another target in tables of odd length": [
        name for name, case in CASES.items() if case.sizes[2] % 2 and case.ignored < 1
    ],
    "half of the table's gradient": [
        name for name, case in CASES.items() if "table" in case.differentiated and case.ignored < 1
    ],
}


def dense(fault):
    """A loss of all logits with one fault, or with none."""

    def loss(hidden, table, targets, ignore_index=-100, soft_cap=None):
        if fault == "half of the table's gradient":
            table = (table + jax.lax.stop_gradient(table)) / 2
        logits = jnp.dot(hidden, table.T, preferred_element_type=jnp.float32)
        if soft_cap:
            capped = soft_cap * jnp.tanh(logits / soft_cap)
            if fault == "soft cap without derivative":
                capped = logits + jax.lax.stop_gradient(capped - logits)
            logits = capped
        live = targets != ignore_index
        columns = jnp.where(live, targets, 0)[:, None]
        if fault == "another target in tables of odd length":
            columns -= len(table) % 2
        most = jax.lax.stop_gradient(logits.max(axis=1, keepdims=True))
        powers = jnp.exp(logits - most)
        if fault == "sums in half precision":
            start = jnp.zeros_like(powers[:, 0], hidden.dtype)
            add = lambda total, column: (total + column.astype(total.dtype), None)
            total = jax.lax.scan(add, start, powers.T)[0].astype(jnp.float32)
        else:
            total = powers.sum(axis=1)
        each = jnp.log(total) + (most - jnp.take_along_axis(logits, columns, axis=1))[:, 0]
        count = live.size if fault == "the mean is over all tokens" else live.sum()
        if fault != "NaN without tokens":
            count = jnp.maximum(count, 1)
        return jnp.where(live, each, 0).sum() / count

    return loss


OTHERS = "prime sizes", "one token", "large logits", "ignored tokens", "bias", "weights"


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault, monkeypatch):
    """Each fault fails its cases and no other; without one, a fault would pass."""
    few = {*FAULTS[fault], *OTHERS, *DEVICES}  # a fault of one or two cases leaves others alone
    if 0 < len(FAULTS[fault]) <= 2:
        cases = {name: case for name, case in CASES.items() if name in few}
        monkeypatch.setattr(cross_entropy, "CASES", cases)
    results = check_cross_entropy(dense(fault), raises=False)
    failed = {result.case for result in results if result.passed is False}
    run = {result.case for result in results if result.passed is not None}
    assert failed == {*FAULTS[fault]} & run
    assert {*cross_entropy.CASES} - run == {"bias", "weights", *DEVICES}


def test_the_error_has_a_line_for_every_failed_case(monkeypatch):
    """With the errors and their bounds, or what the loss raised; without it, a maintainer would
    see the first fault alone.
    """
    names = "float16", "ignored tokens", "all tokens ignored", "soft cap"
    monkeypatch.setattr(cross_entropy, "CASES", {name: CASES[name] for name in names})

    def loss(hidden, table, targets, ignore_index=None):
        if hidden.dtype == jnp.float16:
            raise TypeError("no kernel\nfor float16")
        return dense("the mean is over all tokens")(hidden, table, targets)

    with pytest.raises(AssertionError) as raised:
        check_cross_entropy(loss)
    title, *lines = str(raised.value).split("\n  ")
    assert (
        title == "2 of 4 cases failed:" and lines[0] == "float16: TypeError: no kernel for float16"
    )
    number = r"\de-\d\d"
    says = (
        rf"ignored tokens: loss off by {number} \(at most 1e-05\), gradient by {number} \(1e-05\)"
    )
    assert re.fullmatch(says, lines[1]) and len(lines) == 2


def test_our_loss_passes():
    """Every case on one device, with every argument."""
    results = check_cross_entropy(linear_cross_entropy)
    assert [result.case for result in results if not result.passed] == DEVICES


ON_DEVICES = """
import json
from unittest import mock
from adaptive_jax import linear_cross_entropy
from adaptive_jax.testing import cross_entropy

cases = {name: case for name, case in cross_entropy.CASES.items() if case.specs}
with mock.patch.object(cross_entropy, "CASES", cases):
    results = cross_entropy.check_cross_entropy(linear_cross_entropy)
print(json.dumps([result.passed for result in results]))
"""


def test_our_loss_passes_over_devices(eight):
    """Tokens, words and width cut over 8 devices."""
    assert json.loads(eight(ON_DEVICES)) == [True] * len(DEVICES)
