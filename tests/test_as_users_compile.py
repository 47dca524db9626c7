"""Programs of users: some reference numbers, slow twins and a training run, compiled with the
settings of XLA that users have. The others use fast-compile settings, see tests/programs.py.
"""

import os
import re
import subprocess
import sys

import pytest

from tests.programs import HASTE, ROOT

# Names of tests by their files; those of reference numbers are skipped where there are none.
QUICK = {
    "losses/test_banded.py": [
        "test_loss_and_every_gradient[prime]",
        "test_loss_and_every_gradient[groups among others]",
    ],
    "bodies/test_lstm.py": ["test_the_layer_equals_plain_differentiation"],
    "bodies/test_attention.py": ["test_chunks_equal_the_slow_twin[3-130-4-True-0.3-True]"],
    "reference/test_fairseq_code.py": ["test_train_trajectory"],
}
SLOW = {
    "bodies/test_attention.py": ["test_chunks_equal_the_slow_twin"],
    "reference/test_fairseq_code.py": ["test_adaptive_input", "test_adaptive_softmax"],
    "reference/test_awd_lstm_code.py": ["test_splitcross"],
    "reference/test_gcnn_code.py": ["test_training"],
    "reference/test_groc_code.py": ["test_train_sparse"],
    "training/test_runs.py": ["test_bfloat16_trains_on_float32_parameters"],
}
CODE = """
import os, sys, pytest
from tests import programs
assert "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.first
@pytest.mark.parametrize(
    "chosen", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"]
)
def test_numbers_as_users_compile(chosen):
    """A pass of XLA that changes a number, or fuses what must not be, shows only where it runs."""
    names = [f"tests/{file}::{name}" for file, tests in chosen.items() for name in tests]
    flags = os.environ["XLA_FLAGS"].replace(HASTE, "")
    done = subprocess.run(
        [sys.executable, "-c", CODE, "-v", "-rs", "-p", "no:cacheprovider", *names],
        cwd=ROOT,
        env=os.environ | {"HASTE": "", "XLA_FLAGS": flags},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    ran = set(re.findall(r"(tests/\S+::\w+).* PASSED", done.stdout))
    absent = set(re.findall(r"SKIPPED \[\d+\] (\S+?):\d+: needs ", done.stdout))
    names = [name for name in names if name.split("::")[0] not in absent]
    assert names and ran >= {name.split("[")[0] for name in names}
