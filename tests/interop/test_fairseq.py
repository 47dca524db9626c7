"""Converted models of fairseq give the numbers that fairseq computed with the same weights.

tests/reference/test_fairseq_code.py compares all the rest that fairseq computed.
"""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.bodies.positions import sinusoids
from adaptive_jax.config.keys import resolve
from adaptive_jax.interop.convert import read_checkpoint
from adaptive_jax.interop.converter import completed
from adaptive_jax.interop.fairseq import config_of, parameters_of
from adaptive_jax.model.language_model import build, parameter_shapes
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.runs.checkpoints import Checkpoints
from adaptive_jax.runs.run import Run
from adaptive_jax.runs.settings import read_config, to_json
from adaptive_jax.training.finetuning import config_of_origin
from adaptive_jax.training.loop import train
from tests import refuses

FIXTURES = Path(__file__).parents[1] / "fixtures" / "fairseq"
LEGACY = FIXTURES / "legacy.pt"  # args, fused attention, the stream format
DICT = FIXTURES / "dict.txt"
KEYS = "src_tokens", "target", "token_log_prob"


def close(ours, theirs, rtol=2e-5, atol=2e-5):
    np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


def test_learned_positions():
    """A model whose table of positions holds the sinusoids gives the numbers of the model with
    sinusoids.

    fairseq's table begins with two rows that no token reads.
    """
    recorded = np.load(FIXTURES / "expected.npz")
    data = {name: recorded[f"lm_tied_adaptive/batch1/{name}"] for name in KEYS}
    tokens, targets = (jnp.asarray(data[name], jnp.int32) for name in KEYS[:2])
    time = tokens.shape[1]
    table = np.concatenate([np.full((2, 64), np.nan), sinusoids(jnp.arange(time), 64)])
    _, checkpoint = read_checkpoint(LEGACY)
    state = checkpoint.state | {"decoder.embed_positions.weight": table}
    config = config_of(checkpoint.options | {"decoder_learned_pos": True}, state, 1000)
    assert (config["body"]["positions"], config["body"]["max_positions"]) == ("learned", time)
    model, params = build(config, 1000), parameters_of(state, config)
    np.testing.assert_array_equal(
        params["body"]["learned_positions"]["table"], table[2:].astype(np.float32)
    )
    real = data["target"] != 1
    batch = Batch(tokens, targets, jnp.asarray(real, jnp.float32), jnp.arange(len(tokens)))
    (_, nll), _ = jax.jit(lambda params: model.apply({"params": params}, batch))(params)
    close(-nll[real], data["token_log_prob"][real])
    with refuses("decoder.embed_positions.weight"):
        parameters_of(checkpoint.state, config)
    options = checkpoint.options | {"no_token_positional_embeddings": True}
    assert config_of(options, checkpoint.state, 1000)["body"]["positions"] == "none"


def test_vectors_that_are_not_scaled():
    """With learned positions and one table for input and softmax; against the scaled model of a
    table of its own whose vectors are 1 / sqrt(16) as long.
    """
    options, state = small_model(adaptive=False)
    options |= {
        "decoder_input_dim": 16,
        "decoder_output_dim": 16,
        "decoder_learned_pos": True,
    }
    bits = np.random.RandomState(1)
    table, positions = (bits.normal(size=(rows, 16)).astype(np.float32) for rows in (20, 10))
    state = {name: a for name, a in state.items() if "project" not in name and "embed" not in name}
    state |= {"decoder.embed_tokens.weight": table, "decoder.embed_positions.weight": positions}
    tied = options | {"no_scale_embedding": True, "share_decoder_input_output_embed": True}
    own = state | {"decoder.embed_out": table, "decoder.embed_tokens.weight": table / 4}
    tokens = bits.randint(20, size=(2, 8))
    batch = Batch(tokens, tokens, np.ones((2, 8), np.float32), jnp.arange(2))
    nll = []
    for given, tensors in (tied, state), (options, own):
        config = config_of(given, tensors, 20)
        model, params = build(config, 20), parameters_of(tensors, config)
        nll.append(jax.jit(model.apply)({"params": params}, batch)[1])
    np.testing.assert_allclose(*nll, rtol=1e-6)


@pytest.fixture(scope="module")
def conversion(quick_command, tmp_path_factory):
    """The command that converts LEGACY, run to its end, and the workdir that it made."""
    workdir = tmp_path_factory.mktemp("converted") / "new" / "run"
    return quick_command("-m", "adaptive_jax", "convert", LEGACY, DICT, workdir), workdir


def test_the_commands(conversion, quick_command):
    """The converter prints the command to evaluate the model, which gives fairseq's perplexity."""
    done, workdir = conversion
    assert (done.returncode, done.stderr) == (0, "")
    assert "92,048" in done.stdout and "1,000 words, after 2 updates" in done.stdout
    line = re.search(
        r"^python (-m adaptive_jax evaluate .*) +# that holds test.txt$", done.stdout, re.MULTILINE
    ).group(1)
    done = quick_command(*line.replace("DIRECTORY", str(FIXTURES)).split())
    assert done.returncode == 0, done.stderr
    assert "test: perplexity 1,043.64 (6.9505 nats a word) over 684 words" in done.stdout
    assert sorted(path.name for path in workdir.iterdir()) == [
        "checkpoints",
        "config.json",
        "eval",
        "trained.json",
        "vocabulary.sha256",
        "vocabulary.txt",
    ]


def test_a_converted_run(conversion):
    """Its config and its parameters are those of the checkpoint, and it has no other item. Its
    schedule is stated in fairseq's words, not translated.
    """
    _, checkpoint = read_checkpoint(LEGACY)
    config = config_of(checkpoint.options, checkpoint.state, 1000)
    params = parameters_of(checkpoint.state, config)
    _, workdir = conversion
    trained = json.loads((workdir / "trained.json").read_text())
    assert (trained["lr_scheduler"], trained["t_mult"]) == ("cosine", 2.0)
    assert config["schedule"] == completed({"data.vocabulary_size": 1000})["schedule"]
    assert to_json(read_config(workdir), sort_keys=True) == to_json(config, sort_keys=True)
    checkpoints = Checkpoints(workdir, read_only=True)
    shapes = parameter_shapes(build(config, 1000))
    restored = checkpoints.restore(checkpoints.step("best"), {"params": shapes})
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, restored, {"params": params})
    assert {path.name for path in (workdir / "checkpoints" / "2").iterdir() if path.is_dir()} == {
        "params"
    }


def test_training_goes_on_from_a_converted_run(conversion, tmp_path):
    """An update at a rate of 0 leaves the body as it was converted, bit by bit."""
    _, workdir = conversion
    (tmp_path / "text").mkdir()
    for split in "train", "valid":
        shutil.copy(FIXTURES / "test.txt", tmp_path / "text" / f"{split}.txt")
    config = config_of_origin(str(workdir)) | {"init_from": str(workdir), "init_words": "both"}
    config |= {"steps": 1, "tokens_per_update": 64, "tokens_per_device": 64}
    config["data"] |= {"path": str(tmp_path / "text")}
    config["batches"] |= {"sequence_length": 16}
    config["schedule"] |= {"warmup_from": 0.0, "warmup_steps": 1}
    train(config, tmp_path / "run")
    before, after = (Run.open(folder, "latest") for folder in (workdir, tmp_path / "run"))
    assert after.step == 1 and set(before.vocabulary.words) <= set(after.vocabulary.words)
    jax.tree.map(np.testing.assert_array_equal, after.params["body"], before.params["body"])


def test_the_config_of_the_paper_s_model():
    """The released WikiText-103 options, under their oldest names, give the row `adp_t` with
    the code's own 8 heads.
    """
    from configs import wikitext103

    options = {
        "arch": "transformer_lm_wiki103",
        "no_tie_adaptive_proj": False,
        "tie_adaptive_weights": True,
        "adaptive_input": True,
        "decoder_embed_dim": 1024,
        "decoder_input_dim": 1024,
        "decoder_output_dim": 1024,
        "decoder_ffn_embed_dim": 4096,
        "decoder_layers": 16,
        "decoder_attention_heads": 8,
        "dropout": 0.3,
        "attention_dropout": 0.1,
        "relu_dropout": 0.1,
        "adaptive_softmax_dropout": 0.2,
        "adaptive_softmax_cutoff": "20000,60000",
        "adaptive_input_cutoff": "20000,60000",
        "tokens_per_sample": 512,
        "max_tokens": 4096,
        "update_freq": [2],
        "distributed_world_size": 8,
        "seed": 0,
    }
    ours = resolve(wikitext103.get_config("adp_t"))
    theirs = config_of(
        options,
        {"decoder.version": np.full(1, 3.0), "decoder.adaptive_softmax.version": np.ones(1)},
        267_744,
    )
    assert theirs.keys() == ours.keys() and theirs["data"].keys() == ours["data"].keys()
    ours["body"]["heads"], ours["output"]["input_dropout"] = 8, 0.2
    for key in "input", "body", "output", "batches", "tokens_per_update":
        assert theirs[key] == ours[key], key


def small_model(adaptive):
    """The options and random weights of a model with tables narrower than its body."""
    options = {
        "arch": "transformer_lm",
        "decoder_embed_dim": 16,
        "decoder_input_dim": 12,
        "decoder_output_dim": 8,
        "decoder_layers": 1,
        "decoder_ffn_embed_dim": 8,
        "decoder_attention_heads": 2,
        "no_decoder_final_norm": True,
        "adaptive_softmax_cutoff": "5,9,20" if adaptive else None,
        "adaptive_softmax_factor": 2.0,
        "tokens_per_sample": 8,
    }
    shapes = {
        "embed_tokens.weight": (20, 12),
        "project_in_dim.weight": (16, 12),
        "project_out_dim.weight": (8, 16),
        "layers.0.self_attn.in_proj_weight": (48, 16),
        "layers.0.self_attn.in_proj_bias": (48,),
    }
    for name, shape in {
        "self_attn.out_proj": (16, 16),
        "fc1": (8, 16),
        "fc2": (16, 8),
        "self_attn_layer_norm": (16,),
        "final_layer_norm": (16,),
    }.items():
        shapes |= {f"layers.0.{name}.weight": shape, f"layers.0.{name}.bias": shape[:1]}
    softmax = {
        "version": (1,),
        "head.weight": (7, 8),
        "tail.0.0.weight": (4, 8),
        "tail.0.2.weight": (4, 4),
        "tail.1.0.weight": (2, 8),
        "tail.1.2.weight": (11, 2),
    }
    shapes |= (
        {f"adaptive_softmax.{name}": shape for name, shape in softmax.items()}
        if adaptive
        else {"embed_out": (20, 8)}
    )
    bits = np.random.RandomState(0)
    return options, {
        f"decoder.{name}": bits.normal(scale=0.4, size=shape).astype(np.float16)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("adaptive", [True, False], ids=["adaptive", "full"])
def test_projections_around_the_body(adaptive):
    """Against a dense computation: fairseq projects hidden states before head and tails alike."""
    options, state = small_model(adaptive)
    config = config_of(options, state, 20)
    params = parameters_of(state, config)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    model = build(config, 20)
    weights = {
        name.removeprefix("decoder."): tensor.astype(np.float64) for name, tensor in state.items()
    }
    run = jax.jit(
        lambda *given, method: model.apply(*given, method=method), static_argnames="method"
    )
    vectors = run({"params": params}, np.arange(20)[None], method=lambda m, t: m.input(t))
    close(vectors[0], weights["embed_tokens.weight"] @ weights["project_in_dim.weight"].T)

    def log_softmax(x, *layers):
        for layer in layers:
            x = x @ weights[layer].T
        return x - np.log(np.exp(x).sum(axis=1, keepdims=True))

    hidden = np.random.RandomState(1).normal(size=(3, 16)).astype(np.float32)
    x, softmax = hidden @ weights["project_out_dim.weight"].T, "adaptive_softmax"
    if adaptive:
        head = log_softmax(x, f"{softmax}.head.weight")
        tails = [
            log_softmax(x, f"{softmax}.tail.{i}.0.weight", f"{softmax}.tail.{i}.2.weight")
            + head[:, 5 + i, None]
            for i in range(2)
        ]
        expected = np.concatenate([head[:, :5], *tails], axis=1)
    else:
        expected = log_softmax(x, "embed_out")
    close(run({"params": params}, hidden, method=lambda m, h: m.output.log_probs(h)), expected)
