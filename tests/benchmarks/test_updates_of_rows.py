"""The benchmark of row-sparse updates: its peers make one update, and it counts their bytes."""

import re
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import row_sparse
from tests import refuses


def test_both_peers_make_the_same_update(capsys):
    """Else it would compare the times of two methods; the bytes are those of its docstring."""
    ids = jnp.array([5, 0, 5, 31])
    for optimizer in row_sparse.OPTIMIZERS.values():
        table = jnp.ones((32, 4))
        arguments = optimizer, table, optimizer.init(table), ids
        ours, theirs = row_sparse.row_sparse(*arguments)[0], row_sparse.dense(*arguments)[0]
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        assert (ours != table).any(axis=1).sum() == 3
    row_sparse.measure(rows=5_000, width=8, count=64, repeats=1)
    printed = capsys.readouterr().out
    touched = int(re.search(r"64 ids of (\d+) rows", printed)[1])
    moved = [float(each) for each in re.findall(r"moved +([\d.]+)", printed)]
    counts = [32 * (384 + rows * n) / 1e6 for n in (4, 6) for rows in (touched, 5_000)]
    assert moved == pytest.approx(counts, abs=0.06) and touched < 64


@pytest.mark.parametrize("rows", [["0"], ["ten"], ["10", ""]])
def test_rows_that_are_no_numbers(rows):
    """One line, before anything is measured."""
    with refuses("numbers", "1"):
        row_sparse.main(SimpleNamespace(rows=rows, width=1, ids=1, repeats=1))
