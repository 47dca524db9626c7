"""Training as GroC's public code trains: its tied model, its sparse updates and its finetuning,
update by update.

`tests/fixtures/groc/train.npz` is the file `train` of the reference numbers, with the texts as ids
and the lists of the lexicon. In the runs of groc the filters see letters as in the public code, see
tests/inputs/test_groc.py.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from adaptive_jax.config.keys import complete
from adaptive_jax.data.batches.streams import bptt_lengths
from adaptive_jax.data.vocabulary.spelling import spelling
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.model.gradients import make_gradients
from adaptive_jax.model.language_model import build
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.parallel import sharding
from adaptive_jax.training.sparse import optimizer
from tests.inputs import test_groc

FIXTURES = Path(__file__).parents[1] / "fixtures" / "groc"
WORDS = json.loads((FIXTURES / "train.json").read_text())["words"]
as_the_code = test_groc.as_the_code
LONGEST, BPTT, RATE, COLUMNS = 17, 7, 0.01, 30  # columns: those of the validation split
ADAM = {
    "optimizer.name": "adam",
    "optimizer.learning_rate": RATE,
    "optimizer.epsilon": 1e-9,
    "optimizer.l2_decay": 1.2e-6,
    "optimizer.clip_norm": 0.3,
    "schedule.name": "constant",
    "schedule.warmup_steps": 0,
}
BODY = {
    "body.name": "awd_lstm",
    "body.features": 10,
    "body.widths": (12, 10),
    "body.biases": 2,
    "body.ar": 2.0,
    "body.tar": 1.0,
}
BODY |= {
    f"body.{name}": 0.0 for name in ("input_dropout", "hidden_dropout", "dropout", "weight_drop")
}
TIED = {
    "input.name": "lookup",
    "output.name": "softmax",
    "output.table.name": "tied",
    "output.table.bias": True,
}
GROC = {
    "input.name": "groc",
    "input.lexicon": "given",
    "input.form": "code",
    "input.combine": "add",
    "input.mean": "most",
    "input.filters": test_groc.FILTERS,
    "output.name": "softmax",
    "output.table.name": "mapped",
    "output.table.depth": 0,
    "output.table.bias": "predicted",
}


@pytest.fixture(scope="module")
def arrays():
    with np.load(FIXTURES / "train.npz") as stored:
        return dict(stored)


def parameters(arrays, prefix):
    """Tensors of the public code by our names."""
    tensors = {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
    kinds = {
        "weight_ih_l0": "input",
        "weight_hh_l0": "recurrent",
        "bias_ih_l0": "bias",
        "bias_hh_l0": "recurrent_bias",
    }
    params = {"input": {}, "body": {}, "output": {"table": {}}}
    params["input"] = test_groc.of_code(
        {name: array for name, array in tensors.items() if name.startswith("_char")}
    )
    for name, array in tensors.items():
        if name.startswith("_prefix_network"):
            _, layer, kind = name.split(".")
            params["body"][f"{kinds[kind]}_{layer}"] = array.T
    table = params["output"]["table"]
    if "_bias.weight" in tensors:
        table |= {"bias_weights": tensors["_bias.weight"].T, "bias": tensors["_bias.bias"][0]}
    else:
        params["input"]["table"], table["bias"] = (
            tensors["_lookup.weight"],
            tensors["_decoder.bias"],
        )
        table |= {"table_0": tensors["_decoder.weight"]} if "_decoder.weight" in tensors else {}
    return jax.tree.map(jnp.asarray, params)


def lexicon_of(arrays, text):
    letters = spelling(
        Vocabulary(tuple(WORDS[text]), np.ones(len(WORDS[text]), np.int64)), 20, True
    )
    lists = {
        name: {"words": arrays[f"{text}/{name}"].astype(np.int32)}
        for name in ("relations", "definitions")
    }
    return {"input": jax.tree.map(jnp.asarray, {"spelling": letters} | lists)}


def columns(ids, count):
    """The split as so many columns, `[time, columns]`; tokens that are left over are dropped."""
    return ids[: len(ids) // count * count].reshape(count, -1).T.astype(np.int32)


def window(source, start, rows, length):
    """So many rows of the columns, padded to `length`, as a batch of one microbatch; the first
    one begins anew.
    """
    inputs, targets = (
        np.pad(source[i : i + rows].T, ((0, 0), (0, length - rows)))[None]
        for i in (start, start + 1)
    )
    ids, weights = (
        np.arange(source.shape[1], dtype=np.int32)[None],
        np.broadcast_to(np.arange(length) < rows, inputs.shape),
    )
    return Batch(
        inputs, targets, weights.astype(np.float32), ids, reset=np.full(ids.shape, start == 0)
    )


class Trajectory:
    """Training on given windows, which are padded to `LONGEST`; they are read padded to
    `COLUMNS`, too, by one program.
    """

    def __init__(self, layers, params, known, share=1.0):
        self.vocabulary = (
            len(known["input"]["spelling"]["row_of_word"])
            if known
            else len(params["input"]["table"])
        )
        config = complete(BODY, layers, ADAM, {"compose_share": share})
        self.model, self.known, self.params = build(config, self.vocabulary), known, params
        self.mesh, self.tables = sharding.device_mesh(), {}
        self.ours = optax.with_extra_args_support(optimizer(config, self.model))
        self.state, self.programs = self.ours.init(params), {}
        self.gradients = make_gradients(self.model, self.mesh, 0, shares_tables=bool(known))

    def start(self):
        self.carry = self.model.body.initial_carry(COLUMNS)

    def run(self, function, *arguments):
        """The function, compiled once for each shape, in haste."""
        key = function, str(jax.tree.map(jnp.shape, arguments))
        if key not in self.programs:
            lowered = jax.jit(function, out_shardings=sharding.replicated(self.mesh)).lower(
                *self.put(arguments)
            )
            self.programs[key] = lowered.compile()
        return self.programs[key](*self.put(arguments))

    def put(self, arguments):
        return jax.device_put(arguments, sharding.replicated(self.mesh))

    def compose(self, params, tables=None):
        variables = {"params": params, "lexicon": self.known} | (
            {"tables": tables} if tables else {}
        )
        return self.model.apply(
            variables, jnp.arange(self.vocabulary), method="compose", mutable=["tables"]
        )[1]["tables"]

    def read(self, params, tables, carry, batch):
        """The carry after the tokens of the batch that count, and their mean loss without
        penalties.
        """
        variables = {"params": params, "lexicon": self.known}
        if tables:  # with a bias for each word
            variables["tables"] = self.compose(params, tables)

        def step(carry, token):
            inputs, targets, weights = (a[:, None] for a in token)
            one = Batch(inputs, targets, weights, batch.row_ids)
            loss, after = self.model.apply(variables, one, carry)
            return jax.tree.map(
                lambda new, old: jnp.where(weights > 0, new, old), after, carry
            ), jnp.sum(loss.nll * weights)

        tokens = [a.T for a in (batch.inputs, batch.targets, batch.weights)]
        carry, nll = jax.lax.scan(step, carry, tokens)
        return carry, jnp.sum(nll) / jnp.sum(batch.weights)

    def anew(self, *given):
        return self._update(False, *given[:-1], {})

    def zeros(self, *given):
        return self._update(False, *given)

    def still(self, *given):
        return self._update(True, *given)

    def _update(self, stored, params, state, carry, batch, scale, tables):
        carry = jax.tree.map(lambda a: a[None], carry)
        gradients, _, sums, tables = self.gradients(
            params, self.known, jnp.zeros((), jnp.int32), batch, carry, tables
        )
        gradients = jax.tree.map(lambda g: g / sums.tokens, gradients)
        changes, state = self.ours.update(gradients, state, params, scale=scale, stored=stored)
        return changes, state, (sums.nll / sums.tokens, optax.global_norm(gradients)), tables

    def advance(self, source, start, rows, rate, tables=None, still=True):
        """Makes an update, with stored tables or, without, composing anew; its plain loss and
        gradient norm.

        still: with stored tables, the encoder keeps still; else Adam goes on with gradients of 0 of
            its parameters.
        """
        batch, scale = window(source, start, rows, LONGEST), jnp.asarray(rate / RATE, jnp.float32)
        if start == 0:
            self.start()
        carry = jax.tree.map(lambda a: a[: source.shape[1]], self.carry)
        given = self.params, self.state, carry, batch, scale, tables or {}
        update = self.anew if not tables else self.still if still else self.zeros
        changes, self.state, numbers, made = self.run(update, *given)
        self.tables = tables or made
        self.score(batch)
        self.params = self.apply(changes)
        return [float(number) for number in numbers]

    def score(self, batch):
        """The mean loss of a window, after which the carry is that of the next one."""
        _, columns, rows = batch.inputs.shape
        more = (0, COLUMNS - columns), (0, LONGEST - rows)
        batch = jax.tree.map(lambda a: np.pad(a[0], more[: a.ndim - 1]), batch)
        self.carry, nll = self.run(self.read, self.params, self.tables, self.carry, batch)
        return float(nll)

    def apply(self, changes):
        return jax.tree.map(lambda p, change: p + change, self.params, changes)

    def validate(self, source, tables=()):
        """Mean loss of each window of the validation split, the next of `tables` in each."""
        self.start()
        losses = []
        for start, stored in zip(
            range(0, len(source) - 1, BPTT), tables or [{}] * len(source), strict=False
        ):
            self.tables = stored
            losses.append(
                self.score(window(source, start, min(BPTT, len(source) - 1 - start), BPTT))
            )
        return losses


def assert_same_parameters(ours, theirs, tolerance):
    """Those that the file has; entries to a share of the largest."""
    for group, arrays in theirs.items():
        for name, array in (arrays["table"] if group == "output" else arrays).items():
            mine = (ours[group]["table"] if group == "output" else ours[group])[name]
            np.testing.assert_allclose(
                mine, array, rtol=0, atol=tolerance * np.abs(array).max(), err_msg=name
            )


@pytest.fixture(scope="module")
def tied(arrays):
    """The case `tied` trained to its end, with losses and norms of updates and the losses of
    validation windows.
    """
    train, valid = columns(arrays["d_src/train"], 4), columns(arrays["d_src/valid"], 30)
    ours = Trajectory(TIED, parameters(arrays, "tied/start/"), {})
    seen, validation = [], []
    windows = list(
        zip(*(arrays[f"tied/{name}"].tolist() for name in ("i", "seq", "lr")), strict=True)
    )
    for number, (start, rows, rate) in enumerate(windows):
        seen.append(ours.advance(train, start, rows, rate))
        if number + 1 == len(windows) or windows[number + 1][0] == 0:
            carry = ours.carry
            validation += ours.validate(valid)
            ours.carry = carry
    return ours, np.array(seen), validation


def test_train(arrays, tied):
    """Lengths of windows and rates, from its random numbers; losses, norms, validation and
    parameters.
    """
    ours, seen, validation = tied
    starts, lengths, drawn = (arrays[f"tied/{name}"] for name in ("i", "seq", "drawn"))
    source = np.random.RandomState(11)
    numbers = np.array([(source.random_sample(), source.standard_normal()) for _ in drawn]).T
    np.testing.assert_array_equal(bptt_lengths(BPTT, *numbers), drawn)
    np.testing.assert_array_equal(lengths, np.minimum(drawn, 347 // 4 - 1 - starts))
    np.testing.assert_array_equal(starts[1:], np.where(starts[1:] == 0, 0, (starts + lengths)[:-1]))
    np.testing.assert_allclose(arrays["tied/lr"], RATE * drawn / BPTT, rtol=1e-6)
    np.testing.assert_allclose(seen[:, 0], arrays["tied/loss"], rtol=1e-4)
    np.testing.assert_allclose(seen[:, 1], arrays["tied/gnorm"], rtol=1e-4)
    np.testing.assert_allclose(validation, arrays["tied/eval_loss"][:6], rtol=1e-4)
    assert_same_parameters(ours.params, parameters(arrays, "tied/end/"), 1e-3)


def test_train_finetune_tied(arrays):
    """Rows are carried over by word; then the run, with a fresh optimizer."""
    start = parameters(arrays, "finetune_tied/start/")
    np.testing.assert_array_equal(start["input"]["table"], start["output"]["table"].pop("table_0"))
    both = [
        (WORDS["d_src"].index(word), i)
        for i, word in enumerate(WORDS["d_fine"])
        if word in WORDS["d_src"]
    ]
    before, after = np.array(both).T
    assert len(both) == len(WORDS["d_src"])
    old = parameters(arrays, "tied/end/")
    np.testing.assert_array_equal(start["input"]["table"][after], old["input"]["table"][before])
    np.testing.assert_array_equal(
        start["output"]["table"]["bias"][after], old["output"]["table"]["bias"][before]
    )
    check_finetuning(Trajectory(TIED, start, {}), arrays, "finetune_tied", 1e-4)


def check_finetuning(ours, arrays, case, tolerance):
    source, start = columns(arrays["d_fine/train"], 4), 0
    names = "seq", "lr", "loss", "gnorm"
    for number, (rows, rate, *expected) in enumerate(
        zip(*(arrays[f"{case}/{name}"].tolist() for name in names), strict=True)
    ):
        rows = min(rows, len(source) - 1 - start)
        assert ours.advance(source, start, rows, rate) == pytest.approx(expected, rel=tolerance), (
            number
        )
        start += rows


def follow(ours, arrays, case, rel):
    """A sparse run pass by pass: which tables it uses, losses, norms and last parameters.

    In `groc_sparse_zero_fill` the encoder's gradients on stored updates are zeros, as with PyTorch
    before 2.0, once it had any.
    """
    of, run = (
        {name.split("/", 1)[1]: arrays[name] for name in arrays if name.startswith(f"{c}/")}
        for c in (case, "groc_sparse")
    )
    full = run["rand"] <= 0.4
    train, valid = columns(arrays["d_src/train"], 4), columns(arrays["d_src/valid"], 30)
    stored = encoded = ours.run(ours.compose, ours.params)["input"]
    number, validation, tables, still = 0, [], [], True
    for at in range(len(full) - 31):  # the passes over the test split come last
        if not run["emb_training"][at]:
            if full[at]:
                stored = ours.run(ours.compose, ours.params)["input"]
            tables.append({"input": stored})
            if len(tables) == 2:
                carry = ours.carry
                validation += ours.validate(valid, tables)
                ours.carry, tables = carry, []
            encoded = stored
        else:
            given = None if full[at] else {"input": stored}
            window = int(run["i"][number]), int(run["seq"][number]), float(run["lr"][number])
            numbers = ours.advance(train, *window, given, still)
            assert numbers == pytest.approx([of["loss"][number], of["gnorm"][number]], rel=rel), (
                number
            )
            stored = encoded = ours.tables["input"]
            number += 1
            still = still and (not full[at] or case == "groc_sparse")
        assert float(jnp.sum(encoded["vectors"] ** 2)) == pytest.approx(
            of["emb_sum_of_squares"][at], rel=rel
        ), at
    assert number == len(of["loss"]) == 32
    np.testing.assert_allclose(validation, of["eval_loss"][:6], rtol=1e-4)


def test_train_groc_sparse(arrays, as_the_code):
    """The sparse run, then finetuning on other words; and what old PyTorch made of it, which the
    paper does not describe.

    There Adam moves the encoder by what it remembers of gradients, also on updates that keep the
    vectors frozen (appendix B.4):
    vectors and encoder come apart, and the validation loss is higher. Sparse updates here keep the
    encoder still.
    """
    np.testing.assert_array_equal(
        arrays["groc_sparse/emb_has_gradient"], arrays["groc_sparse/rand"] <= 0.4
    )
    ours = Trajectory(
        GROC, parameters(arrays, "groc_sparse/start/"), lexicon_of(arrays, "d_src"), share=0.4
    )
    begun = ours.params, ours.state
    follow(ours, arrays, "groc_sparse", 5e-4)
    assert_same_parameters(ours.params, parameters(arrays, "groc_sparse/end/"), 1e-3)
    trained = ours.params
    ours.params, ours.state = begun
    follow(ours, arrays, "groc_sparse_zero_fill", 1e-3)
    end = {
        name.split("/")[2]: a
        for name, a in arrays.items()
        if name.startswith("groc_sparse_zero_fill/end/_char")
    }
    assert_same_parameters(ours.params, {"input": test_groc.of_code(end)}, 1e-3)
    bias = arrays["groc_sparse_zero_fill/end/_bias.weight"].T
    np.testing.assert_allclose(
        ours.params["output"]["table"]["bias_weights"], bias, rtol=0, atol=1e-3
    )
    assert (
        np.mean(arrays["groc_sparse_zero_fill/eval_loss"][:6])
        > np.mean(arrays["groc_sparse/eval_loss"][:6]) + 0.3
    )

    tuned = Trajectory(GROC, trained, lexicon_of(arrays, "d_fine"))
    np.testing.assert_allclose(
        tuned.params["output"]["table"]["bias_weights"].T,
        arrays["finetune_groc_sparse_ratio1/start/_bias.weight"],
        atol=1e-3,
    )
    check_finetuning(tuned, arrays, "finetune_groc_sparse_ratio1", 1e-3)
