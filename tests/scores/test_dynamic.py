"""Dynamic evaluation against a slow twin, which writes every update out, and on a text of its
own topic.
"""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.config.keys import complete
from adaptive_jax.data.batches.windows import Windows, windows
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.scores import dynamic as dynamic_module
from adaptive_jax.scores.dynamic import Dynamic, dynamic
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.scores.scoring import score_split
from tests import refuses
from tests.random_runs import quiet, random_run

WORDS = Vocabulary.build({"<eos>": 30} | {f"w{n}": 20 - n for n in range(18)})
NOISY = {
    "input.name": "lookup",
    "input.word_dropout": 0.3,
    "body.name": "awd_lstm",
    "body.features": 6,
    "body.widths": (6,),
    "body.weight_drop": 0.5,
    "body.ar": 2.0,
    "body.tar": 1.0,
    "output.name": "softmax",
    "output.table.name": "tied",
    "output.input_dropout": 0.2,
    "output.label_smoothing": 0.1,
    "output.z_loss": 0.1,
}
SEGMENT, ROWS = 4, 2
SETTINGS = Windows(SEGMENT, 0, "none", "streams", ROWS)
AFTER_CONTEXT = Windows(SEGMENT + 2, 2, "none", "packed", ROWS)


@pytest.fixture(scope="module")
def run():
    return random_run(complete(NOISY), WORDS)


@pytest.fixture(scope="module")
def losses(run):
    """`losses(params, batch, carry) -> (nll, carry, gradient of its mean)`, without noise and by
    plain `jax.grad`.
    """
    model = run.model

    def mean(params, batch, carry):
        hidden, carry = model.apply({"params": params}, batch, carry, method="hidden")
        nll = model.apply({"params": params}, hidden, batch.targets, method="nll")
        return jnp.sum(nll * batch.weights) / jnp.sum(batch.weights), (nll, carry)

    compiled = jax.jit(jax.value_and_grad(mean, has_aux=True))

    def losses(params, batch, carry):
        (_, (nll, carry)), gradient = compiled(params, jax.tree.map(jnp.asarray, batch), carry)
        return np.asarray(nll), carry, gradient

    return losses, model


def by_dynamic(run, ids, options, settings=SETTINGS, train=None, progress=quiet):
    job = SimpleNamespace(
        run=run, ids=ids, windows=settings, train=lambda _: train, progress=lambda _: progress
    )
    return dynamic(job, options)


def first(model, settings):
    """The state of rows that begin; of rows that do not continue each other, none."""
    return model.body.initial_carry(ROWS) if settings.layout == "streams" else ()


def twin(run, losses, ids, options, squares, settings):
    """The parameters follow the text, segment by segment; returns the nll of every token."""
    grad, model = losses
    params, nll, carry = run.params, np.full(len(ids), np.nan), first(model, settings)
    roots = jax.tree.map(jnp.sqrt, squares)
    mean = np.mean(np.concatenate([np.ravel(a) for a in jax.tree.leaves(roots)]))
    for batch, at in windows(ids, WORDS.eos, settings)[1]:
        found, carry, gradient = grad(params, batch.batch, carry)
        nll[at] = found[batch.batch.weights > 0]

        def move(now, trained, g, root):
            if options.rule == "sgd":
                return now - options.rate * g + options.decay * (trained - now)
            back = jnp.minimum(options.decay * root / mean, 1.0)
            return now - options.rate * g / (root + options.epsilon) + back * (trained - now)

        params = jax.tree.map(move, params, run.params, gradient, roots)
    return nll


def mean_squares(run, losses, ids, settings):
    grad, model = losses
    carry, total, count = first(model, settings), 0.0, 0
    for batch, _ in windows(ids, WORDS.eos, settings)[1]:
        _, carry, gradient = grad(run.params, batch.batch, carry)
        squares = jax.tree.map(jnp.square, gradient)
        total, count = jax.tree.map(jnp.add, total, squares) if count else squares, count + 1
    return jax.tree.map(lambda a: a / count, total)


@pytest.mark.parametrize(
    "options, settings",
    [
        (Dynamic("sgd", rate=2.0, decay=0.1), SETTINGS),
        (Dynamic("rms", rate=0.02, decay=0.05), SETTINGS),
        (Dynamic("rms", rate=0.2, decay=0.9, epsilon=0.1), SETTINGS),
        (Dynamic("rms", rate=0.02, decay=0.05), AFTER_CONTEXT),
    ],
    ids=["sgd", "rms", "rms, clipped", "context"],
)
def test_dynamic_evaluation_and_its_twin(run, losses, options, settings):
    """On streams, whose state goes on, and after a context, which has no part in the gradient; the
    last segment is short. No dropout is drawn, and losses are not regularised.
    """
    bits = np.random.default_rng(0)
    train, ids = bits.integers(0, len(WORDS), 64, np.int32), bits.integers(0, 4, 42, np.int32)
    squares = mean_squares(run, losses, train, settings)
    ours = by_dynamic(run, ids, options, settings, train)
    slow = twin(run, losses, ids, options, squares, settings)
    np.testing.assert_allclose(ours, slow, rtol=1e-4, atol=1e-5)
    static, _ = score_split(run, ids, settings, quiet)
    before = next(windows(ids, WORDS.eos, settings)[1])[1]  # the first step
    np.testing.assert_allclose(ours[before], static[before], rtol=1e-5)
    assert np.abs(ours - static).max() > 0.1
    assert ours.mean() < static.mean()  # of four words
    # The run keeps its parameters.
    np.testing.assert_array_equal(score_split(run, ids, settings, quiet)[0], static)


def test_statistics_compile_one_program(run, caplog):
    """Sums that begin elsewhere than they are returned would compile it twice."""
    text = np.random.default_rng(0).integers(0, len(WORDS), 80, np.int32)
    with jax.log_compiles():
        dynamic_module.mean_squares(
            run, text, SETTINGS._replace(rows=5), quiet
        )  # a shape of no other test
    lines = [record.getMessage() for record in caplog.records]
    assert sum(re.match(r"Compiling (jit\()?add\b", line) is not None for line in lines) == 1


STATISTICS = """
import jax, numpy as np
from adaptive_jax.config.keys import complete
from adaptive_jax.scores.dynamic import mean_squares
from tests.scores.test_dynamic import NOISY, SETTINGS, WORDS
from tests.random_runs import quiet, random_run
text = np.random.default_rng(0).integers(0, len(WORDS), 8 * 4 * 30, np.int32)
settings = SETTINGS._replace(rows=8, multiple=8)
squares = mean_squares(random_run(complete(NOISY), WORDS), text, settings, quiet)
print(*(float(a.sum()) for a in jax.tree.leaves(squares)))
"""


def test_statistics_on_eight_devices(eight, capsys):
    """They are those of one device: a sum over devices that is forgotten or doubled changes every
    dynamic rate.
    """
    out = eight(STATISTICS)
    exec(STATISTICS, {})
    statistics = [np.array(out.split(), float) for out in (out, capsys.readouterr().out)]
    np.testing.assert_allclose(*statistics, rtol=1e-4)


def test_statistics_come_from_all_over_the_train_split():
    """The first pages of a text alone would give other rates."""
    sample = dynamic_module._sample(np.arange(4_000), SETTINGS, 25).reshape(20, 10)
    assert sample[:, 0].tolist() == [*range(0, 4_000, 210)] and (np.diff(sample) == 1).all()
    assert len(dynamic_module._sample(np.arange(199), SETTINGS, 25)) == 199


@pytest.mark.parametrize("break_mode", ["eos", "complete_doc"])
def test_parameters_follow_the_text(run, break_mode):
    """Also of examples that see nothing else, whose rows are otherwise sorted by length."""
    lines, read = [[5] * 12, [6], [], [7], [], [3] * 11], []
    ids = np.array([word for line in lines for word in (*line, WORDS.eos)], np.int32)

    def noting(batches, count):
        for batch, at in batches:
            read.append(at)
            yield batch, at

    settings = Windows(16, 0, break_mode, "similar", 1)
    by_dynamic(run, ids, Dynamic("sgd"), settings, progress=noting)
    assert (np.diff(np.concatenate(read)) > 0).all() and len(read) >= 3


def test_steps_that_are_too_large(run):
    """End in one line with the cure."""
    ids = np.random.default_rng(0).integers(0, 4, 42, np.int32)
    with refuses("--method=dynamic", "--rate"):
        by_dynamic(run, ids, Dynamic("sgd", rate=np.inf))


def test_an_evaluation_that_learns(trained, tmp_path, capsys):
    """A text that keeps to one topic becomes cheaper, with statistics of the run's own train
    split; the result says how.
    """
    workdir = shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "test.txt").write_text("the t3w1 the t3w2 the t3w3 the t3w4\n" * 12)
    request = Request(checkpoint="latest", data_path=str(tmp_path), window=8, method="dynamic")
    options = {"rate": 1e-3, "statistics": 5}
    still, learns = (
        evaluate(workdir, request._replace(options=options | {"rate": rate}))
        for rate in (0.0, 1e-3)
    )
    line, *_, path = [
        line for line in capsys.readouterr().out.splitlines() if not line.startswith("  ")
    ][-2:]
    assert learns["nll"] < still["nll"] - 0.1
    assert "; method dynamic, " in line
    assert all(f", {key} " in line for key in options)
    saved = json.loads(Path(path).read_text())
    assert (saved["settings"]["options"], saved["settings"]["rows"]) == (options, 1)
