"""Converted models of AWD-LSTM score as the public code computed with the same weights, from a
state dict or a whole model.pt.

`model_lstm.npz` has weights and logits. torch 2.13 wrote `model_save.pt`, the weights of its case
`tied`: a list of a model, a loss and an optimizer, whose classes have the names and attributes of
the public code's.
"""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.bodies.lstm import State
from adaptive_jax.interop.awd_lstm import AWD_LSTM, config_of, parameters_of
from adaptive_jax.interop.convert import convert, read_checkpoint
from adaptive_jax.interop.words import awd_lstm_words, read_corpus
from adaptive_jax.model.language_model import build
from adaptive_jax.numerics.batch import Batch
from tests import refuses
from tests.interop.torch_writer import Module, save

FIXTURES = Path(__file__).parents[1] / "fixtures" / "awd_lstm"
SAVED = FIXTURES / "model_save.pt"
ARRAYS = dict(np.load(FIXTURES / "model_lstm.npz"))
WORDS = [f"w{i}" for i in range(35)] + ["<eos>", "<unk>"]


def read(path):
    converter, checkpoint = read_checkpoint(path)
    assert converter is AWD_LSTM
    return checkpoint


def part(prefix):
    return {
        name.removeprefix(prefix): array
        for name, array in ARRAYS.items()
        if name.startswith(prefix)
    }


def state_dict(case, dropped=True):
    """The tensors as the public model names them, where its recurrent matrices are dropped, or
    not.
    """
    state = part(f"{case}/weight/")
    state = {"decoder.weight": state["encoder.weight"]} | state
    if dropped:
        state = {
            name.replace("weight_hh_l0", "weight_hh_l0_raw"): array for name, array in state.items()
        }
        state = {re.sub(r"(rnns\.\d)", r"\1.module", name): array for name, array in state.items()}
    return state


def write_words(path, words=WORDS):
    path.write_text("".join(f"{word}\n" for word in words))
    return path


def write_corpus(path):
    """A corpus whose words appear in the order of `WORDS`, most of them unequally often."""
    path.mkdir()
    numbers = np.random.RandomState(0).zipf(1.3, 300) % 35
    lines = [" ".join(WORDS[:35])] + [
        " ".join(f"w{i}" for i in row) for row in numbers.reshape(-1, 6)
    ]
    (path / "train.txt").write_text("\n".join(lines) + "\n\n")
    (path / "valid.txt").write_text("w3 <unk>\n")
    (path / "test.txt").write_text("w4 w9 w30\n\nw1 w1 w7 <unk> w20\n")
    return path


@pytest.mark.parametrize("case, dropped", [("tied", True), ("untied", True), ("last_word", False)])
def test_model_lstm(case, dropped, tmp_path):
    """The logits of two windows, whatever the order of the words here: most frequent first."""
    loaded = read(save(state_dict(case, dropped), tmp_path / "model.pt"))
    vocabulary, state = awd_lstm_words(write_corpus(tmp_path / "corpus"), loaded.state)
    config = config_of(loaded.options, state, 37)
    model, params = build(config, 37), AWD_LSTM.parameters(state, config)
    ours = np.array([vocabulary.index[word] for word in WORDS])  # the id here of each id there
    assert np.any(ours != np.arange(37)) and np.all(np.diff(vocabulary.counts) <= 0)
    arrays = part(f"{case}/")
    carry = tuple(
        State(arrays[f"init_h{i}"], arrays[f"init_c{i}"]) for i in range(len(model.body.widths))
    )
    carry = jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), carry)

    @jax.jit
    def log_probs(tokens, carry):
        hidden, carry = model.apply(
            {"params": params}, Batch(tokens, tokens, None, jnp.arange(4)), carry, method="hidden"
        )
        return (
            model.apply(
                {"params": params}, hidden, method=lambda m, hidden: m.output.log_probs(hidden)
            ),
            carry,
        )

    for window in range(2):
        tokens, logits = (
            arrays[f"win{window}/tokens"],
            arrays[f"win{window}/logits"].reshape(-1, 4, 37),
        )
        expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        log_prob, carry = log_probs(ours[tokens.T], carry)
        np.testing.assert_allclose(
            log_prob[..., ours], expected.swapaxes(0, 1), rtol=2e-5, atol=2e-5
        )


def test_model_pt(tmp_path, capsys):
    """A whole model.pt becomes a run on streams with the rates that the model has as attributes,
    and those of its layers.
    """
    convert(SAVED, write_corpus(tmp_path / "corpus"), tmp_path / "run")
    assert "2,291 parameters, 37 words" in capsys.readouterr().out
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["body"]["widths"] == [10, 10, 6] and config["body"]["input_dropout"] == 0.3
    assert config["body"]["weight_drop"] == 0.5  # as one of its layers
    assert config["batches"]["layout"] == "streams" and config["output"]["table"]["bias"]


def test_a_state_dict_and_a_model_are_the_same(tmp_path):
    """Both give the same parameters; the only difference is what options they know. Of a
    recurrent matrix and its copy that was dropped, the former counts.
    """
    dropped = {"rnns.0.module.weight_hh_l0": np.ones((40, 10), np.float32)}
    state = read(save(state_dict("tied") | dropped, tmp_path / "state.pt")).state
    model = Module("model\nRNNModel", state_dict("tied"), dropout=0.5)
    alone, saved = read(save(model, tmp_path / "model.pt")), read(SAVED)
    assert (saved.options["dropout"], alone.options["dropout"]) == (0.4, 0.5)
    expected = parameters_of(part("tied/weight/"))
    for tensors in state, saved.state, alone.state:
        jax.tree.map(np.testing.assert_array_equal, parameters_of(tensors), expected)


def changed(**changes):
    """The state dict of `tied` with tensors changed, added or, if None, removed; `__` stands
    for a dot.
    """
    state = state_dict("tied") | {name.replace("__", "."): array for name, array in changes.items()}
    return {name: array for name, array in state.items() if array is not None}


def saved_with_splits(state, tombstones, splits):
    """The file that main.py saves of a model with tensors of these names, and of its loss: without
    an optimizer.
    """
    return [
        Module("model\nRNNModel", state),
        Module("splitcross\nSplitCrossEntropyLoss", tombstones, splits=[0, *splits, 10**8]),
    ]


@pytest.mark.parametrize(
    "case, tied", [("one_split", True), ("three_splits", True), ("three_splits", False)]
)
def test_splitcross(case, tied, tmp_path):
    """A softmax that the loss splits, tied or not: full log-probabilities, with the words in
    the order of their classes.
    """
    file = np.load(FIXTURES / "splitcross.npz")
    arrays = {
        name.removeprefix(f"{case}/"): file[name]
        for name in file.files
        if name.startswith(f"{case}/")
    }
    splits = json.loads((FIXTURES / "splitcross.json").read_text())["cases"][case]["splits"]
    state = state_dict("tied") | {
        "encoder.weight": arrays["weight"] * (1 if tied else 2),
        "decoder.weight": arrays["weight"],
        "decoder.bias": arrays["bias"],
    }
    content = saved_with_splits(
        state, {name: arrays[name] for name in ("tail_vectors", "tail_bias")}, splits
    )
    loaded = read(save(content, tmp_path / "model.pt"))
    words = write_words(tmp_path / "words.txt", [*WORDS, "a", "b", "c"])
    vocabulary, state = awd_lstm_words(words, loaded.state)
    # In the order of ids, because none has a count
    assert vocabulary.words == (*WORDS, "a", "b", "c") and set(vocabulary.counts) == {1}
    corpus = write_corpus(tmp_path / "corpus")
    few = {"encoder.weight": state["encoder.weight"][: len(WORDS)], "tail_vectors": None}
    counted = awd_lstm_words(corpus, few)[0]  # ids are those of the corpus, and counts are kept
    assert dict(zip(counted.words, counted.counts, strict=True)) == read_corpus(corpus)
    assert (np.diff(counted.counts) > 0).any()
    config = config_of(loaded.options, state, 40)
    assert (config["output"]["table"]["cutoffs"], config["output"]["table"]["name"]) == (
        tuple(splits),
        "tied" if tied else "own",
    )
    model, params = build(config, 40), AWD_LSTM.parameters(state, config)
    hidden = jnp.asarray(arrays["hiddens"], jnp.float32)
    found = jax.jit(
        lambda hidden: model.apply(
            {"params": params}, hidden, method=lambda m, h: m.output.log_probs(h)
        )
    )(hidden)
    np.testing.assert_allclose(found, arrays["logprob"], rtol=2e-5, atol=2e-5)


TAILS = {"tail_vectors": np.zeros((2, 6), np.float32), "tail_bias": np.zeros(2, np.float32)}
GRU = {
    name: array[: len(array) * 3 // 4] if "rnns" in name else array
    for name, array in state_dict("tied").items()
}


@pytest.mark.parametrize(
    "content, words, says",
    [
        (
            saved_with_splits(state_dict("tied"), TAILS, [5]),
            WORDS,
            ["output/clusters [2, 6], not [1, 6]"],
        ),
        (
            saved_with_splits(state_dict("tied"), {"tail_bias": np.zeros(1, np.float32)}, [5]),
            WORDS,
            ["missing: output/clusters [1, 6]"],
        ),
        (
            saved_with_splits(state_dict("untied"), TAILS, [5, 9]),
            WORDS,
            ["output/clusters [2, 6], not [2, 10]"],
        ),
        (
            saved_with_splits(state_dict("tied"), TAILS, [9, 40]),
            WORDS,
            ["cutoff 40 is not below the vocabulary size 37"],
        ),
        (saved_with_splits(state_dict("tied"), TAILS, [9, 37]), WORDS, ["cutoff 37 is not below"]),
        (
            saved_with_splits(state_dict("tied"), {"other": np.ones(3, np.float32)}, []),
            WORDS,
            ["left over: other [3]"],
        ),
        (
            changed(encoder__weight=np.zeros((75_001, 1), np.float32)),
            WORDS,
            ["75,001 words and no loss", "use the model.pt"],
        ),
        (  # the state dict of a loss, which does not say where it splits the words
            [changed(encoder__weight=np.zeros((75_001, 1), np.float32)), TAILS],
            WORDS,
            ["75,001 words and no loss", "use the model.pt"],
        ),
        (
            changed(rnns__1__module__bias_ih_l0=None),
            WORDS,
            ["missing: body/bias_1 [40]"],
        ),
        (
            changed(rnns__1__module__weight_hh_l0_raw=None),
            WORDS,
            ["damaged or unknown", "body/recurrent_1"],
        ),
        (
            changed(rnns__0__linear__weight=np.ones((40, 10), np.float32)),
            WORDS,
            ["left over: rnns.0.linear.weight [40, 10]"],
        ),
        (
            changed(decoder__bias=np.ones(36, np.float32)),
            WORDS,
            ["output/table/bias [36], not [37]"],
        ),
        (GRU, WORDS, ["body/bias_0 [30], not [40]", "and 8 more"]),
        (
            changed(),
            WORDS[1:],
            [
                "36 words and the checkpoint 37",
                "train.txt, valid.txt and test.txt",
                "one word a line",
            ],
        ),
        (changed(), ["w0", "w1", "w0"], ["line 3", "'w0' repeats a word"]),
        (changed(), ["w0", "w1 5"], ["line 2", "'w1 5' is not one word"]),
        (changed(), ["w0", ""], ["line 2", "'' is not one word"]),
        (changed(), ["w0"], ["has no <eos>"]),
        (
            Module("model\nRNNModel", (), {"self": 3}),
            WORDS,
            ["AttributeError", "damaged or unknown"],
        ),
    ],
)
def test_models_that_cannot_be_converted(content, words, says, tmp_path):
    """One line with what is wrong, and nothing written."""
    model, words = save(content, tmp_path / "model.pt"), write_words(tmp_path / "words.txt", words)
    with refuses(*says):
        convert(model, words, tmp_path / "run")
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt", "words.txt"}


def test_a_byte_order_mark_is_no_letter(tmp_path):
    """Of the first word of a list, which became `<unk>` in every evaluation."""
    (tmp_path / "words.txt").write_text("the\n<eos>\ncat\n", encoding="utf-8-sig")
    assert list(read_corpus(tmp_path / "words.txt")) == ["the", "<eos>", "cat"]
