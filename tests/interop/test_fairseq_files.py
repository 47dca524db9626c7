"""Reading the files of fairseq: checkpoints of every age, the dictionary, and one line for
whatever is wrong with them.
"""

import argparse
import functools
import json
import math
import pickle
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.interop import convert as convert_module
from adaptive_jax.interop import converter
from adaptive_jax.interop.convert import convert, read_checkpoint
from adaptive_jax.interop.fairseq import config_of, parameters_of
from adaptive_jax.interop.words import read_dictionary
from adaptive_jax.model.language_model import build, parameter_shapes
from tests import refuses
from tests.interop import torch_writer
from tests.interop.torch_writer import as_zip, save, value

FIXTURES = Path(__file__).parents[1] / "fixtures" / "fairseq"
LEGACY = FIXTURES / "legacy.pt"
CURRENT = FIXTURES / "lm_post_norm.pt"


def read(path):
    return read_checkpoint(path)[1]


@functools.cache
def legacy():
    """A checkpoint and its config, to be read only."""
    checkpoint = read(LEGACY)
    return checkpoint, config_of(checkpoint.options, checkpoint.state, 1000)


@pytest.mark.parametrize(
    "options",
    [
        {"args": argparse.Namespace(arch="transformer_lm", max_tokens=5, decoder_layers=3)},
        {
            "args": None,
            "cfg": {
                "_name": None,
                "dataset": {"_name": None, "max_tokens": 5, "decoder_layers": 4},
                "model": {"_name": "transformer_lm", "decoder_layers": 3},
            },
        },
        {
            "args": None,
            "cfg": {
                "dataset": {"max_tokens": 5},
                "model": argparse.Namespace(arch="transformer_lm", decoder_layers=3),
            },
        },
    ],
)
@pytest.mark.parametrize(
    "extra, nll",
    [
        ({"val_loss": 3.0}, pytest.approx(3 * math.log(2))),
        ({"val_loss": None}, None),
        ({"val_loss": math.inf}, None),
        (None, None),
    ],
)
def test_options_and_progress(options, extra, nll, tmp_path):
    """The same options from every format; the number of updates, and the validation loss, if
    there is one, in nats.
    """
    content = {
        "model": {},
        "optimizer_history": [{"num_updates": 3}, {"num_updates": 7}],
        "extra_state": extra,
    }
    as_zip(pickle.dumps(content | options, 2), tmp_path / "lm.pt")
    loaded = read(tmp_path / "lm.pt")
    assert {name: loaded.options[name] for name in ("arch", "max_tokens", "decoder_layers")} == {
        "arch": "transformer_lm",
        "max_tokens": 5,
        "decoder_layers": 3,
    }
    assert (loaded.state, loaded.updates, loaded.nll) == ({}, 7, nll)


def test_names_of_2018():
    """The oldest names of the norms, and a stored table of positions, give the same parameters."""
    checkpoint, config = legacy()
    older = {"self_attn_layer_norm": "layer_norms.0", "final_layer_norm": "layer_norms.2"}
    state = {"decoder.embed_positions.weights": np.ones((9, 64), np.float32)}
    for name, tensor in checkpoint.state.items():
        for new, old in older.items():
            name = name.replace(new, old)
        state[name] = tensor
    assert not set(state) <= set(checkpoint.state) and any(
        "layer_norms.2.bias" in name for name in state
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        parameters_of(state, config),
        parameters_of(checkpoint.state, config),
    )


def test_a_word_that_is_overwritten(tmp_path):
    """The word gets the later line's id, and the earlier id stays without a word; `</s>` in a
    text becomes an ordinary word.
    """
    (tmp_path / "dict.txt").write_text(
        "the 9\n<unk> 7 #fairseq:overwrite\n</s> 5 #fairseq:overwrite\nthe 2 #fairseq:overwrite\n"
    )
    vocabulary = read_dictionary(tmp_path / "dict.txt")
    assert len(vocabulary) == 8
    assert vocabulary.encode("the <unk> </s> other") == [7, 5, 6, 5, 2]


def test_a_byte_order_mark_is_no_part_of_the_most_frequent_word(tmp_path):
    """That word was unknown."""
    (tmp_path / "dict.txt").write_bytes(b"\xef\xbb\xbfthe 9\ncat 2\n")
    assert read_dictionary(tmp_path / "dict.txt").words[4:] == ("the", "cat")


@pytest.mark.parametrize(
    "text, says",
    [
        (b"the 5\nof\n", ["line 2", "'of'", "one space and its count"]),
        (b"the 5\nof 1.5\n", ["line 2", "of 1.5"]),
        (b"the 5\nof -3\n", ["line 2", "of -3"]),
        (b"the 5\n\nof 3\n", ["line 2", "''"]),
        (b"the 5\nof 3\nthe 1\n", ["line 3", "the 1", "repeats"]),
        (b"the 5\n</s> 3\n", ["line 2", "</s>", "repeats"]),
        (b"the 5\n<eos> 3\n", ["line 2", "<eos>", "rename"]),
        (b"the 5\n\xff 3\n", ["utf-8", "position 6"]),
        (b"the 99999999999999999999\n", ["line 1", "count"]),
        (b"", ["no words"]),
    ],
)
def test_a_wrong_dictionary(tmp_path, text, says):
    """One line with the file and the number of the line."""
    path = tmp_path / "dict.txt"
    path.write_bytes(text)
    with refuses(str(path), *says):
        read_dictionary(path)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"arch": "transformer_wmt_en_de"}, ["arch='transformer_wmt_en_de'", "no layer"]),
        ({"arch": None}, ["arch=None"]),
        ({"activation_fn": "gelu"}, ["activation_fn='gelu'"]),
        (
            {"layernorm_embedding": True, "scale_fc": True},
            ["layernorm_embedding=True", "scale_fc=True"],
        ),
        ({"quant_noise_pq": 0.1}, ["quant_noise_pq=0.1"]),
        ({"decoder_layers": "two"}, ["body.layers='two'"]),
        ({"dropout": [0.1]}, ["body.dropout=(0.1,)"]),
        ({"adaptive_input_cutoff": "200,400"}, ["adaptive_input_cutoff='200,400'"]),
        ({"adaptive_input": False}, ["adaptive_input=False"]),
        ({"decoder_output_dim": 32}, ["decoder_output_dim=32"]),
        (
            {"adaptive_softmax_factor": 2.5, "adaptive_input_factor": 2.5},
            ["adaptive_softmax_factor=2.5"],
        ),
        (
            {
                "adaptive_softmax_cutoff": None,
                "adaptive_input_cutoff": None,
                "tie_adaptive_weights": False,
                "share_decoder_input_output_embed": True,
            },
            ["adaptive_input=True"],
        ),
    ],
)
def test_an_option_that_cannot_be_converted(changes, says):
    """The message has each option with its value."""
    checkpoint, _ = legacy()
    with refuses(*says):
        config_of(checkpoint.options | changes, checkpoint.state, 1000)


@pytest.mark.parametrize(
    "version, changes, norm",
    [
        (3, {}, True),
        (2, {}, False),
        (None, {}, False),
        (3, {"no_decoder_final_norm": True}, False),
        (3, {"decoder_final_norm": False}, False),
        (3, {"decoder_normalize_before": False}, False),
        (3, {"no_tie_adaptive_proj": True}, False),
    ],
)
def test_the_last_norm(version, changes, norm):
    """It depends on the version of fairseq's decoder and on four options, which replaced each
    other over the years.
    """
    checkpoint, _ = legacy()
    options = {
        name: value for name, value in checkpoint.options.items() if name != "no_decoder_final_norm"
    } | changes
    state = checkpoint.state | {"decoder.version": np.full(1, version, np.float32)}
    if version is None:
        del state["decoder.version"]
    body = config_of(options, state, 1000)["body"]
    assert body["final_norm"] == norm
    assert body["name"] == (
        "transformer" if changes != {"decoder_normalize_before": False} else "transformer_post_norm"
    )


def test_the_oldest_adaptive_softmax():
    """Without a version, fairseq itself cannot read it."""
    checkpoint, _ = legacy()
    state = {
        name: tensor
        for name, tensor in checkpoint.state.items()
        if name != "decoder.adaptive_softmax.version"
    }
    with refuses("older than fairseq itself can read"):
        config_of(checkpoint.options, state, 1000)


@pytest.mark.parametrize("name", ["arch", "decoder_layers", "adaptive_softmax_cutoff", "dropout"])
def test_lists_without_end_in_an_option(name, tmp_path):
    """A list of the same list twice, 40 times over, has a text of 2^40 items: it is refused at
    once.
    """
    links = (b"(h%ch%clq%c0" % (i, i, i + 1) for i in range(40))
    twice = b"]q\x000" + b"".join(links) + b"h\x28"
    options = b"}(" + value("arch") + value("transformer_lm") + value(name) + twice + b"u"
    state = b"}" + value("x") + torch_writer.tensor(0, (4,), (1,))[:-1] + b"s"
    content = b"}(" + value("args") + options + value("model") + state + b"u."
    as_zip(b"\x80\x02" + content, tmp_path / "lm.pt")
    (tmp_path / "dict.txt").write_text("the 5\n")
    start = time.perf_counter()
    with refuses():
        convert(tmp_path / "lm.pt", tmp_path / "dict.txt", tmp_path / "run")
    assert time.perf_counter() - start < 10


def changed(**changes):
    """The legacy state with tensors changed, added or, if None, removed; `__` stands for a dot."""
    state = legacy()[0].state | {
        f"decoder.{name.replace('__', '.')}": tensor for name, tensor in changes.items()
    }
    return {name: tensor for name, tensor in state.items() if tensor is not None}


@pytest.mark.parametrize(
    "changes, says",
    [
        (
            {"layer_norm__weight": np.ones(64, np.float32)},
            ["left over: decoder.layer_norm.weight [64]"],
        ),
        ({"layers__1__fc1__bias": None}, ["missing: decoder.layers.1.fc1.bias [128]"]),
        (
            {"layers__0__fc2__weight": np.ones((64, 127), np.float32)},
            ["decoder.layers.0.fc2.weight [64, 127], not [64, 128]"],
        ),
        (
            {"layers__0__self_attn__in_proj_weight": np.ones((190, 64), np.float32)},
            ["qkv_proj.weight [190, 64], not [192, 64]"],
        ),
        (
            {"adaptive_softmax__head__word_proj__weight": np.ones((200, 64), np.float32)},
            ["tied to another by its options", "adaptive_softmax.head.word_proj.weight"],
        ),
        (
            {f"layers__2__{i}": np.ones(i, np.float32) for i in range(1, 7)},
            ["decoder.layers.2.4 [4] and 2 more"],
        ),
        (
            {
                "embed_tokens__embeddings__2__0__weight": None,
                "adaptive_softmax__tail__1__2__weight": None,
                "extra": np.ones(1, np.float32),
            },
            [
                "left over: decoder.extra [1];",
                "missing: decoder.embed_tokens.embeddings.2.0.weight [500, 4]",
            ],
        ),
    ],
)
def test_tensors_of_another_model(changes, says):
    """The message lists the differences of both sides, with shapes, in one line."""
    with refuses(*says):
        parameters_of(changed(**changes), legacy()[1])


def test_every_tensor_is_needed_and_used(monkeypatch):
    """A checkpoint without one of its tensors is refused; if one is doubled, the parameters
    change by as much. Tries one layer.
    """
    checkpoint, config = legacy()
    shapes = parameter_shapes(build(config, 1000))
    monkeypatch.setattr(converter, "build", lambda *_: None)
    monkeypatch.setattr(
        converter, "parameter_shapes", lambda _: shapes
    )  # tracing the model would take longest
    partners = (  # of tied tensors; a checkpoint may have one of the two
        "word_proj.weight",
        "tail.0.0.weight",
        "tail.0.2.weight",
        "tail.1.0.weight",
        "tail.1.2.weight",
    )
    state = {name: a for name, a in checkpoint.state.items() if not name.endswith(partners)}
    params = parameters_of(state, config)
    jax.tree.map(np.testing.assert_array_equal, params, parameters_of(checkpoint.state, config))
    book = ("version", "_float_tensor")
    names = [name for name in state if not name.endswith(book) and "layers.1" not in name]
    assert len(names) == 19
    for name in names:
        without = {key: tensor for key, tensor in state.items() if key != name}
        with refuses("missing"):
            parameters_of(without, config)
        moved = jax.tree.map(
            lambda a, b: float(np.abs(a - b).sum()),
            parameters_of(state | {name: 2 * state[name]}, config),
            params,
        )
        np.testing.assert_allclose(
            sum(jax.tree.leaves(moved)), np.abs(state[name]).sum(), rtol=1e-4
        )


@pytest.mark.parametrize(
    "spoil, says",
    [
        (
            lambda d: (d / "lm.pt").write_bytes((d / "lm.pt").read_bytes()[:200_000]),
            ["lm.pt", "must be a whole file"],
        ),
        (
            lambda d: shutil.copy(FIXTURES.parent / "torch_zip.pt", d / "lm.pt"),
            ["lm.pt", "a checkpoint that fairseq saved"],
        ),
        (lambda d: (d / "lm.pt").unlink(), ["cannot read", "lm.pt"]),
        (
            lambda d: (d / "dict.txt").write_text("the 5\n"),
            ["cutoff 500 is not below the vocabulary size 5"],
        ),
        (lambda d: (d / "dict.txt").unlink(), ["cannot read", "dict.txt"]),
        (
            lambda d: (d / "run").mkdir() or (d / "run" / "config.json").touch(),
            ["run already exists"],
        ),
        (lambda d: (d / "run").touch(), ["run already exists"]),
    ],
)
def test_nothing_is_written_after_bad_input(tmp_path, spoil, says):
    """One line with the name of the file; the directory stays as it was."""
    shutil.copy(CURRENT, tmp_path / "lm.pt")
    shutil.copy(FIXTURES / "dict.txt", tmp_path)
    spoil(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with refuses(*says):
        convert(tmp_path / "lm.pt", tmp_path / "dict.txt", tmp_path / "run")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_converter_of_ones_own(monkeypatch, tmp_path):
    """Another kind of checkpoint needs one entry: here a state dict of two tables. Numbers that
    are not finite are refused for all kinds.
    """

    def config_of(options, state, vocabulary_size):
        features = state["in"].shape[1]
        body = {"body.name": "lstm", "body.features": features, "body.widths": (features,)}
        output = {"output.name": "softmax", "output.table.name": "own"}
        return converter.completed(
            {"input.name": "lookup", "data.vocabulary_size": vocabulary_size} | body | output
        )

    def parameters_of(state, config):
        rest = {name: tensor for name, tensor in state.items() if name not in ("in", "out")}
        tables = {"input/table": state["in"], "output/table/table_0": state["out"]}
        return converter.assign(rest | tables, None, config)

    toy = converter.Converter(
        "a toy",
        lambda content: converter.Checkpoint({"toy": True}, content) if "in" in content else None,
        lambda path, state: (Vocabulary(("<eos>", "<unk>", "a"), np.array([3, 2, 1])), state),
        config_of,
        parameters_of,
    )
    monkeypatch.setattr(convert_module, "CONVERTERS", [*convert_module.CONVERTERS, toy])
    state = {"in": np.ones((3, 4), np.float32), "out": np.zeros((3, 4), np.float32)}
    for name, shape in {"input_0": (4, 16), "recurrent_0": (4, 16), "bias_0": (16,)}.items():
        state[f"body/{name}"] = np.ones(shape, np.float32)
    save(state, tmp_path / "toy.pt")
    convert(tmp_path / "toy.pt", "", tmp_path / "run")
    assert json.loads((tmp_path / "run" / "trained.json").read_text()) == {"toy": True}
    [path] = (tmp_path / "run" / "checkpoints").iterdir()
    assert path.name == "0"
    state["out"][1, 2] = np.nan
    save(state, tmp_path / "toy.pt")
    with refuses("toy.pt has numbers that are not finite, in output.table.table_0"):
        convert(tmp_path / "toy.pt", "", tmp_path / "x")
    as_zip(pickle.dumps({}), tmp_path / "other.pt")
    with refuses("or a toy"):
        convert(tmp_path / "other.pt", "", tmp_path / "x")
