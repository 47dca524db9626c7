"""Checkpoints of fairseq: the numbers it computed, from the weights it saved, through the converter.

`tests/fixtures/fairseq` holds what is needed everywhere. Where the whole set of reference files lies beside the project, in
shared/reference/fairseq, all of it is checked.
"""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax import AdaptiveSoftmax, LanguageModel, build
from adaptive_jax.bodies.transformer import sinusoids
from adaptive_jax.data.batches.batching import Batch
from adaptive_jax.devices import sharding
from adaptive_jax.evaluation import scoring
from adaptive_jax.fairseq import command as fairseq
from adaptive_jax.fairseq.config import config_of
from adaptive_jax.fairseq.tensors import parameters_of
from adaptive_jax.plans.costs import plan
from adaptive_jax.training import optim
from adaptive_jax.training.state import State, shape_of_state
from adaptive_jax.training.update import make_update
from adaptive_jax.workdir.checkpoints import Checkpoints, read_config

FIXTURES = Path(__file__).parent / "fixtures" / "fairseq"
SHARED = Path(__file__).parents[2] / "shared" / "reference" / "fairseq"
LEGACY = FIXTURES / "lm_tied_adaptive_legacy.pt"  # args, fused attention, the stream format
CURRENT = FIXTURES / "lm_post_norm.pt"  # cfg, the zip format
DICT = FIXTURES / "dict.txt"

MODELS = ("tied_adaptive", "tied_adaptive_legacy", "untied_adaptive", "full_softmax_tied", "fixed_input_adaptive_softmax",
          "char_cnn", "post_norm")
whole_set = pytest.mark.skipif(not SHARED.is_dir(), reason="the whole set of reference files is not beside the project")


def close(ours, theirs, rtol=2e-5, atol=2e-5):
    np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


def close_gradient(ours, theirs):
    """1e-4, relative to each entry or to the largest of its array."""
    close(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


class ReleasedSoftmax(AdaptiveSoftmax):
    """The released criterion, its fault included: of word cutoff + 1 of every tail, only the head's term counts.

    It compares its padding id, 1, with ids counted within each cluster.
    """

    def loss(self, hidden, targets, weights, rows=None, *, train=False):
        bands, clusters = self._bands()
        sizes = [len(table) for table, _ in bands]
        hit = jnp.stack([targets == start + 1 for start in np.cumsum(sizes[:-1])], axis=-1)
        lost = hit.any(axis=-1)
        total, nll = super().loss(hidden, targets, jnp.where(lost, 0.0, weights), rows, train=train)
        head = jax.nn.log_softmax(hidden @ jnp.concatenate([bands[0][0], clusters]).T)
        in_head = -jnp.sum(hit * head[..., sizes[0]:], axis=-1)
        return total + jnp.sum(weights * in_head), nll


def released(model):
    """A model with the released criterion's fault, if its softmax is adaptive: the full softmax has none."""
    if type(model.output) is not AdaptiveSoftmax:
        return model
    return LanguageModel(model.input, model.body, ReleasedSoftmax(model.output.table))


@functools.cache
def loaded(path):
    """A checkpoint with its config, its vocabulary and its parameters here."""
    checkpoint, vocabulary = fairseq.read(path), fairseq.read_dictionary(DICT)
    config = config_of(checkpoint.options, checkpoint.state, len(vocabulary))
    return checkpoint, config, vocabulary, jax.tree.map(jnp.asarray, parameters_of(checkpoint.state, config))


def inner_states(config, vocabulary, params, tokens):
    """`[layers + 1, batch, time, features]`: what enters the blocks, and what each of them gives."""
    model = build(config, vocabulary)
    vectors = model.apply({"params": params}, tokens, method=lambda m, t: m.input(t))
    features = vectors.shape[-1]
    states = [vectors * features**0.5 + sinusoids(jnp.arange(tokens.shape[1]), features)[None]]
    for layers in range(1, config["body"]["layers"] + 1):
        cut = config | {"body": config["body"] | {"layers": layers, "final_norm": False}}
        first = params | {"body": {"blocks": jax.tree.map(lambda a, n=layers: a[:n], params["body"]["blocks"])}}
        states.append(build(cut, vocabulary).apply({"params": first}, tokens, method="hidden"))
    return jnp.stack(states)


@functools.cache
def measure(path, gradients=False):
    """A compiled function of ids, targets and weights `[batch, time]`: by fairseq's names, what it recorded of a batch."""
    _, config, vocabulary, params = loaded(path)
    model = build(config, vocabulary)

    # Compiled in a hurry: each of these programs runs twice.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def measure(params, tokens, targets, weights):
        def criterion(params):
            return released(model).apply({"params": params}, tokens, targets, weights)

        if gradients:
            (total, nll), gradient = jax.value_and_grad(criterion, has_aux=True)(params)
        else:
            (total, nll), gradient = criterion(params), None
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        return {
            "inner_states": inner_states(config, vocabulary, params, tokens),
            "log_prob": model.apply({"params": params}, tokens, positions, method="log_probs"),
            "token_log_prob": -nll,
            "criterion_loss_sum": total,
            "gradients": gradient,
        }

    return functools.partial(measure, params)


@pytest.mark.parametrize("path, case", [(LEGACY, "lm_tied_adaptive"), (CURRENT, "lm_post_norm")], ids=["legacy", "current"])
def test_outputs(path, case):
    """Of a batch with padding and the words that the padding rule concerns, from a file of either format."""
    data = np.load(FIXTURES / "expected.npz")
    data = {name.rpartition("/")[2]: data[name] for name in data.files if name.startswith(case)}
    assert (data["target"] == 1).sum() == 5
    check_outputs(measure(path), data)


def check_outputs(measure, data):
    """Hidden states, log-probabilities and losses of a batch, where there is a target; all that was measured."""
    tokens, targets = (jnp.asarray(data[name], jnp.int32) for name in ("src_tokens", "target"))
    real = data["target"] != 1
    ours = measure(tokens, targets, jnp.asarray(real, jnp.float32))
    close(ours["inner_states"][:, real], data["inner_states"][:, real])
    close(ours["token_log_prob"][real], data["token_log_prob"][real])
    close(-ours["token_log_prob"][real].mean() / np.log(2), data["eval_loss_base2"])
    np.testing.assert_allclose(ours["criterion_loss_sum"], data["criterion_loss_sum"], rtol=2e-5)
    if "log_prob" in data:
        close(ours["log_prob"][real], data["log_prob"][real])
    return ours


@whole_set
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(name):
    """All that is recorded of every model: the outputs, the whole distribution, and the gradient of every parameter."""
    path = SHARED / f"lm_{name}.pt"
    checkpoint, config, *_ = loaded(path)
    recorded = np.load(SHARED / f"lm_{name.removesuffix('_legacy')}.npz")
    for batch in "batch0", "batch1":
        data = {key.removeprefix(f"{batch}/"): recorded[key] for key in recorded.files if key.startswith(batch)}
        ours = check_outputs(measure(path, gradients=True), data)
        theirs = {key.removeprefix("grad/"): data[key] for key in data if key.startswith("grad/")}
        if name == "char_cnn":
            move_empty_character(theirs, checkpoint.state)
        jax.tree.map(close_gradient, ours["gradients"], parameters_of(theirs, config))


def move_empty_character(gradients, state):
    """Row 0 of these characters is not zero, so a filter's bias here holds its response to it: db' = db, dw' = dw - db x row."""
    source = "decoder.embed_tokens"
    empty = state[f"{source}.char_embeddings.weight"][0]
    assert empty.all()
    for i in range(4):
        weight, bias = (gradients[f"{source}.convolutions.{i}.{kind}"] for kind in ("weight", "bias"))
        gradients[f"{source}.convolutions.{i}.weight"] = weight - bias[:, None, None] * empty[None, :, None]


@whole_set
@pytest.mark.parametrize("softmax, agrees", [(ReleasedSoftmax, True), (AdaptiveSoftmax, False)], ids=["released", "right"])
def test_training(softmax, agrees):
    """Twelve updates from the same weights and batches: losses, gradient norms, rates and the last parameters.

    With the released criterion's fault they agree, the parameters to 1e-6 of the largest of their array. Without it, as
    this project trains, losses differ by up to 1% (0 in a batch without such words, which are 0.2% of these targets), and
    after twelve updates parameters differ by up to 3% of the largest of their array.
    """
    data = np.load(SHARED / "train_trajectory.npz")
    case = json.loads((SHARED / "train_trajectory.json").read_text())["cases"]["train"]
    rates = case["lr_scheduler"]
    options = case["model_options"] | rates | {
        "arch": "transformer_lm_wiki103", "optimizer": "nag", "lr_scheduler": "cosine", "max_update": 30,
        "momentum": case["momentum"], "clip_norm": case["clip_norm"]}
    version = {"decoder.adaptive_softmax.version": np.ones(1)}

    def parameters(when):
        return parameters_of({n.removeprefix(f"{when}/"): data[n] for n in data.files if n.startswith(f"{when}/")}, config)

    config = config_of(options, version, case["vocab_size"])
    model = build(config, case["vocab_size"])
    model = LanguageModel(model.input, model.body, softmax(model.output.table))
    optimizer, rate = optim.from_config(config["optimizer"])
    mesh = sharding.device_mesh()
    params = jax.tree.map(jnp.asarray, parameters("init"))
    state = State(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    update = make_update(model, optimizer, rate, mesh, seed=0)
    log = []
    for step in range(case["steps"]):
        parts = [[data[f"step{step}/micro{i}/{name}"] for i in range(case["update_freq"])] for name in ("src_tokens", "target")]
        inputs, targets = (np.stack(part).astype(np.int32) for part in parts)
        batch = Batch(inputs, targets, (targets != 1).astype(np.float32))
        state, numbers = update(state, sharding.put_rows(mesh, batch, axis=1))
        log.append({name: float(value) for name, value in numbers.items()})
    losses, norms, steps = (np.array([row[name] for row in log]) for name in ("loss", "gradient_norm", "learning_rate"))
    np.testing.assert_allclose(steps, data["log/lr_used"], atol=1.2e-7)  # float32 at the highest rate, 1
    expected = jax.tree.leaves(parameters("final"))
    away = max(np.abs(o - t).max() / np.abs(t).max() for o, t in zip(jax.tree.leaves(state.params), expected, strict=True))
    ratio = losses / np.log(2) / data["log/loss_base2"]
    if agrees:
        np.testing.assert_allclose(ratio, 1.0, atol=1e-5)
        np.testing.assert_allclose(norms, data["log/gnorm"], rtol=1e-4)
        assert away < 1e-5
    else:
        assert 0.005 < np.abs(ratio - 1).max() < 0.02
        assert 0.01 < away < 0.1


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory):
    """`workdirs[path]`: the checkpoints of the fixtures, converted."""
    made = {path: tmp_path_factory.mktemp("converted") / "new" / path.stem for path in (LEGACY, CURRENT)}
    for path, workdir in made.items():
        fairseq.convert(path, DICT, workdir)
    return made


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A home directory for the corpus's cache."""
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("case", json.loads((FIXTURES / "eval_lm.json").read_text()), ids=lambda case: case["context_window"])
def test_context_windows(workdirs, home, case):
    """The losses that fairseq's own evaluation gave on a text, for five sizes of context."""
    result = scoring.evaluate(
        workdirs[LEGACY], split="test", window=case["tokens_per_sample_option"], context=case["context_window"],
        checkpoint="best", data_path=str(FIXTURES))
    assert result["words"] == case["n_tokens_scored"]
    close(result["nll"] / np.log(2), case["loss_base2"])


def test_the_commands(command, home, tmp_path):
    """The converter says how to go on, and evaluate.py gives fairseq's perplexity."""
    done = command("-m", "adaptive_jax.fairseq", LEGACY, DICT, tmp_path / "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "92,048" in done.stdout and "1,000 words, after 2 updates" in done.stdout
    line = re.search(r"^python (evaluate.py .*) +# that holds test.txt$", done.stdout, re.MULTILINE).group(1)
    done = command(*line.replace("DIRECTORY", str(FIXTURES)).split())
    assert done.returncode == 0, done.stderr
    assert "test: perplexity 1043.64 (6.9505 nats a word) over 684 words" in done.stdout
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints", "config.json", "eval", "vocabulary.txt"]


def test_help_and_missing_arguments(command, tmp_path):
    """--help says what the arguments are; one that is missing or too many is named in one line."""
    done = command("-m", "adaptive_jax.fairseq", "--help")
    assert "python -m adaptive_jax.fairseq CHECKPOINT DICT OUT_WORKDIR" in done.stdout
    assert "dict.txt" in done.stdout and "Traceback" not in done.stdout + done.stderr
    for arguments, says in ([LEGACY], "error: DICT is missing"), ([LEGACY, DICT, tmp_path / "run", "more"], "'more' is no flag"):
        done = command("-m", "adaptive_jax.fairseq", *arguments)
        assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", [LEGACY, CURRENT], ids=["legacy", "current"])
def test_a_converted_run_is_whole(workdirs, path):
    """The config states every field and passes the plan; the state is one that Checkpoints restores, its momentum 0."""
    config = read_config(workdirs[path])
    model = build(config, 1000)
    given = {"parent", "name", "dtype", "vocabulary_size", "features", "table", "source", "gather"}
    for layer, settings in ((model.input, config["input"]), (model.body, config["body"]), (model.output, config["output"]),
                            (model.output.table, config["output"]["table"])):
        assert {field.name for field in dataclasses.fields(layer)} - given == set(settings) - given
    assert plan(config, 1000, 1)["parameters"]["total"] == {LEGACY: 92_048, CURRENT: 28_296}[path]
    optimizer, _ = optim.from_config(config["optimizer"])
    checkpoints = Checkpoints(workdirs[path], read_only=True)
    state = checkpoints.restore(checkpoints.step("best"), shape_of_state(model, optimizer, sharding.device_mesh()))
    checkpoints.close()
    assert state.step == state.optimizer[2].count == 2
    assert not any(leaf.any() for leaf in jax.tree.leaves(state.optimizer[1].trace))
    expected = loaded(path)[3]
    jax.tree.map(np.testing.assert_array_equal, state.params, expected)


def test_the_config_of_the_paper_s_model():
    """The released WikiText-103 options, under their oldest names, give the row `adp_t` with the code's own 8 heads."""
    from configs import wikitext103

    options = {
        "arch": "transformer_lm_wiki103", "no_tie_adaptive_proj": False, "tie_adaptive_weights": True, "adaptive_input": True,
        "decoder_embed_dim": 1024, "decoder_input_dim": 1024, "decoder_output_dim": 1024, "decoder_ffn_embed_dim": 4096,
        "decoder_layers": 16, "decoder_attention_heads": 8, "dropout": 0.3, "attention_dropout": 0.1, "relu_dropout": 0.1,
        "adaptive_softmax_dropout": 0.2, "adaptive_softmax_cutoff": "20000,60000", "adaptive_input_cutoff": "20000,60000",
        "tokens_per_sample": 512, "max_tokens": 4096, "update_freq": [2], "distributed_world_size": 8, "seed": 0,
        "optimizer": "nag", "lr_scheduler": "cosine", "max_lr": 1.0, "lr": [1e-5], "warmup_init_lr": 1e-7, "t_mult": 2,
        "warmup_updates": 16_000, "lr_period_updates": 18_000.0, "lr_shrink": 0.75, "max_update": 286_000, "momentum": 0.99,
        "clip_norm": 0.1}
    ours = wikitext103.get_config("adp_t").to_dict()
    versions = {"decoder.version": np.full(1, 3.0), "decoder.adaptive_softmax.version": np.ones(1)}
    theirs = config_of(options, versions, 267_744)
    assert theirs["body"] == ours["body"] | {"heads": 8}
    assert {key: theirs[key] for key in ("steps", "seed", "optimizer", "input", "tokens_per_update", "tokens_per_device")} == {
        key: ours[key] for key in ("steps", "seed", "optimizer", "input", "tokens_per_update", "tokens_per_device")}
    assert theirs["output"]["table"] == ours["output"]["table"]
    assert (theirs["output"]["tail_dropout"], theirs["output"]["input_dropout"]) == (0.2, 0.2)
    assert plan(theirs, 267_744, 8)["parameters"]["total"] > 246.9e6


@pytest.mark.parametrize("adaptive", [True, False], ids=["adaptive", "full"])
def test_projections_around_the_body(adaptive):
    """Tables narrower than the body, by a dense computation: fairseq projects hidden states before head and tails alike."""
    bits = np.random.default_rng(0)
    options = {"arch": "transformer_lm", "decoder_embed_dim": 16, "decoder_input_dim": 12, "decoder_output_dim": 8,
               "decoder_layers": 1, "decoder_ffn_embed_dim": 8, "decoder_attention_heads": 2, "no_decoder_final_norm": True,
               "adaptive_softmax_cutoff": "5,9,20" if adaptive else None, "adaptive_softmax_factor": 2.0}
    shapes = {"embed_tokens.weight": (20, 12), "project_in_dim.weight": (16, 12), "project_out_dim.weight": (8, 16),
              "layers.0.self_attn.in_proj_weight": (48, 16), "layers.0.self_attn.in_proj_bias": (48,)}
    for name, shape in {"self_attn.out_proj": (16, 16), "fc1": (8, 16), "fc2": (16, 8), "self_attn_layer_norm": (16,),
                        "final_layer_norm": (16,)}.items():
        shapes |= {f"layers.0.{name}.weight": shape, f"layers.0.{name}.bias": shape[:1]}
    softmax = {"version": (1,), "head.weight": (7, 8), "tail.0.0.weight": (4, 8), "tail.0.2.weight": (4, 4),
               "tail.1.0.weight": (2, 8), "tail.1.2.weight": (11, 2)}
    shapes |= {f"adaptive_softmax.{name}": shape for name, shape in softmax.items()} if adaptive else {"embed_out": (20, 8)}
    state = {f"decoder.{name}": bits.normal(size=shape).astype(np.float16) for name, shape in shapes.items()}
    config = config_of(options, state, 20)
    params = parameters_of(state, config)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    model = build(config, 20)
    weights = {name.removeprefix("decoder."): tensor.astype(np.float64) for name, tensor in state.items()}
    vectors = model.apply({"params": params}, np.arange(20)[None], method=lambda m, t: m.input(t))
    close(vectors[0], weights["embed_tokens.weight"] @ weights["project_in_dim.weight"].T)

    def log_softmax(x, *layers):
        for layer in layers:
            x = x @ weights[layer].T
        return x - np.log(np.exp(x).sum(axis=1, keepdims=True))

    hidden = bits.normal(size=(3, 16)).astype(np.float32)
    x, softmax = hidden @ weights["project_out_dim.weight"].T, "adaptive_softmax"
    if adaptive:
        head = log_softmax(x, f"{softmax}.head.weight")
        tails = [log_softmax(x, f"{softmax}.tail.{i}.0.weight", f"{softmax}.tail.{i}.2.weight") + head[:, 5 + i, None]
                 for i in range(2)]
        expected = np.concatenate([head[:, :5], *tails], axis=1)
    else:
        expected = log_softmax(x, "embed_out")
    close(model.apply({"params": params}, hidden, method=lambda m, h: m.output.log_probs(h)), expected)
