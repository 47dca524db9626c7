"""A run as an object: `adaptive_jax.load`."""

import numpy as np
import pytest

import adaptive_jax


@pytest.fixture(scope="module")
def model(trained):
    return adaptive_jax.load(trained)


def test_load_opens_a_run(model, trained, text):
    assert isinstance(model, adaptive_jax.LoadedModel)
    assert model.run.step == 240 and len(model.run.vocabulary) == 122
    assert repr(model) == "<LoadedModel adaptive → transformer → adaptive, 122 words, step 240>"
    line = (text / "test.txt").read_text().splitlines()[0]
    ids = model.encode(line + "\n")
    assert ids.dtype == np.int32 and ids[-1] == model.run.vocabulary.eos
    assert model.decode(ids) == line + "\n"
    assert adaptive_jax.load(str(trained), 160).run.step == 160


def test_what_is_no_run_is_one_line(tmp_path):
    with pytest.raises(adaptive_jax.InputError, match="holds no run"):
        adaptive_jax.load(tmp_path)
