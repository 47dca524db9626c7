"""Softmaxes, models and training as fairseq has them, whose reference numbers are compared."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from adaptive_jax import AdaptiveInput, OwnTable, Softmax, TiedTable
from adaptive_jax.bodies.positions import sinusoids
from adaptive_jax.config.keys import resolve
from adaptive_jax.data.vocabulary.lexicon import lexicon
from adaptive_jax.interop.convert import read_checkpoint
from adaptive_jax.interop.converter import Checkpoint
from adaptive_jax.interop.fairseq import config_of, parameters_of
from adaptive_jax.interop.words import read_dictionary
from adaptive_jax.model.language_model import LanguageModel, build
from adaptive_jax.numerics.bands import Band
from adaptive_jax.outputs.softmax import Loss
from tests.reference import sets

FAIRSEQ = sets.code("fairseq")
PAD = 1  # fairseq's id of padding; here it is a word like others


class ReleasedSoftmax(Softmax):
    """The released criterion with its fault: of word cutoff + 1 of every tail, only the head's term
    counts.

    It compares its padding id with ids that are counted within each cluster.
    """

    padding: int = PAD

    def loss(self, hidden, targets, weights, row_ids=None, *, train=False):
        if not self.clusters:
            return super().loss(hidden, targets, weights, row_ids, train=train)
        bands = self.table.bands()
        starts = np.cumsum([len(band.table) for band in bands[:-1]])
        hit = jnp.stack([targets == start + self.padding for start in starts], axis=-1)
        total, _ = super().loss(
            hidden, targets, jnp.where(hit.any(axis=-1), 0.0, weights), row_ids, train=train
        )
        head = jax.nn.log_softmax(hidden @ jnp.concatenate([bands[0].table, self.clusters.table]).T)
        of_head = jnp.sum(hit * head[..., starts[0] :], axis=-1)
        return Loss(total - jnp.sum(weights * of_head), self.nll(hidden, targets))


def released(model):
    return LanguageModel(model.input, model.body, ReleasedSoftmax(model.output.table))


class HeadProjected(nn.Module):
    """The table of a source whose first band is not as wide as the hidden states: as fairseq has
    it, the words of the head have a projection, its clusters and the tails do without it.
    """

    source: nn.Module
    features: int
    share_projections: bool

    def setup(self):
        def projection(i, table):
            init, shape = nn.initializers.xavier_uniform(), (table.shape[1], self.features)
            return self.param(f"projection_{i}", init, shape)

        (head, *_), *tails = self.source.bands()
        if not self.share_projections:
            tails = [Band(t.table, projection(i, t.table)) for i, t in enumerate(tails, start=1)]
        self.projected = [Band(head @ projection(0, head)), *tails]

    def bands(self, *, train=False):
        return list(self.projected)


class Tied(nn.Module):
    """An adaptive input and an adaptive softmax on its table."""

    input: nn.Module
    share_projections: bool
    kind: type = Softmax

    def setup(self):
        features = self.input.features
        same_width = (self.input.width or features) == features
        kind = TiedTable if same_width else HeadProjected
        table = kind(self.input, features, self.share_projections)
        self.softmax = self.kind(table)


def shape_of(settings, features="output_dim"):
    """Cutoffs of an adaptive input or softmax: fairseq's cutoffs may end at the vocabulary."""
    width = settings.get("initial_dim", settings.get("input_initial_dim"))
    return {
        "vocabulary_size": settings["vocab_size"],
        "features": settings[features],
        "cutoffs": tuple(cut for cut in settings["cutoff"] if cut < settings["vocab_size"]),
        "factor": settings["factor"],
        "width": width or 0,
    }


def has_no_width(shape):
    """True if the factor leaves the last band no width; fairseq makes matrices of 0 columns."""
    width = shape["width"] or shape["features"]
    return width < shape["factor"] ** len(shape["cutoffs"])


def softmax_of(settings, kind=Softmax):
    """The module, a function that calls its softmax, and where each reference weight goes: name
    to (path, transposed).
    """
    shape = shape_of(settings, "input_dim")
    cutoffs, features = shape["cutoffs"], shape["features"]
    bands = range(len(cutoffs) + 1)
    places = {}
    if settings["tied_embedding"]:
        places["softmax.head.class_proj.weight"] = (("softmax", "clusters"), False)
        if (shape["width"] or features) != features:
            path = "softmax", "table", "projection_0"
            places["softmax.head.word_proj.0.weight"] = (path, False)
        for i in bands:
            places[f"input.embeddings.{i}.0.weight"] = (("input", f"table_{i}"), False)
            places[f"input.embeddings.{i}.1.weight"] = (("input", f"projection_{i}"), True)
            if i and not settings["tie_proj"]:
                path = "softmax", "table", f"projection_{i}"
                places[f"softmax.tail.{i - 1}.0.weight"] = (path, False)
        tied = Tied(AdaptiveInput(**shape), settings["tie_proj"], kind)
        return tied, lambda m: m.softmax, places
    for i in bands[1:]:
        places[f"softmax.tail.{i - 1}.0.weight"] = (("table", f"projection_{i}"), False)
        places[f"softmax.tail.{i - 1}.2.weight"] = (("table", f"table_{i}"), False)
    return kind(OwnTable(**shape | {"width": 0})), lambda m: m, places


def placed(weights, places):
    """Reference arrays as a tree of our parameters."""
    tree = {}
    for name, (path, transposed) in places.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = jnp.asarray(weights[name].T if transposed else weights[name])
    return tree


def head_split(weights, cutoff):
    """An untied reference head holds the words of band 0 and then the clusters; here they are
    two arrays.
    """
    return {
        "table": {"table_0": jnp.asarray(weights[:cutoff])},
        "clusters": jnp.asarray(weights[cutoff:]),
    }


class Converted(NamedTuple):
    """A checkpoint of fairseq and what it is here."""

    checkpoint: Checkpoint
    config: dict
    model: LanguageModel
    variables: dict


@functools.cache
def converted(path):
    (_, checkpoint), vocabulary = read_checkpoint(path), read_dictionary(FAIRSEQ.path("dict.txt"))
    config = config_of(checkpoint.options, checkpoint.state, len(vocabulary))
    model = build(config, len(vocabulary))
    params = jax.tree.map(jnp.asarray, parameters_of(checkpoint.state, config))
    variables = {"params": params, "lexicon": lexicon(vocabulary, model.lexicon_spec())}
    return Converted(checkpoint, config, model, variables)


def inner_states(model, variables, batch):
    """`[layers + 1, rows, time, features]`: the input of the blocks, and the output of each."""
    vectors = model.apply(variables, batch.inputs, method=lambda m, tokens: m.input(tokens))
    time, features = vectors.shape[1:]
    states = [vectors * features**0.5 + sinusoids(jnp.arange(time), features)[None]]
    params = variables["params"]
    for layers in range(1, model.body.layers + 1):
        body = model.body.clone(layers=layers, final_norm=False)
        blocks = jax.tree.map(lambda a, n=layers: a[:n], params["body"]["blocks"])
        given = variables | {"params": params | {"body": {"blocks": blocks}}}
        first = LanguageModel(model.input, body, model.output)
        states.append(first.apply(given, batch, method="hidden")[0])
    return jnp.stack(states)


@functools.cache
def numbers_of(model):
    """A function of variables and a batch: by fairseq's names, its numbers as NumPy arrays."""

    # Optimising the programs would take longer than it saves: each runs twice.
    @jax.jit
    def numbers(variables, batch):
        def criterion(params):
            return released(model).apply(variables | {"params": params}, batch)[0]

        (total, nll), gradient = jax.value_and_grad(criterion, has_aux=True)(variables["params"])
        positions = jnp.broadcast_to(jnp.arange(batch.inputs.shape[1])[None], batch.inputs.shape)
        return {
            "inner_states": inner_states(model, variables, batch),
            "log_prob": model.apply(variables, batch, positions, method="log_probs"),
            "token_log_prob": -nll,
            "criterion_loss_sum": total,
            "gradients": gradient,
        }

    return lambda *given: jax.device_get(numbers(*given))


def move_empty_character(gradients, state):
    """Row 0 of these characters is not zero, so a filter's bias here holds its response to it:
    db' = db, dw' = dw - db x row.
    """
    source = "decoder.embed_tokens"
    empty = state[f"{source}.char_embeddings.weight"][0]
    assert empty.all()
    for i in range(sum("convolutions" in name and "bias" in name for name in gradients)):
        name = f"{source}.convolutions.{i}"
        to_empty = gradients[f"{name}.bias"][:, None, None] * empty[None, :, None]
        gradients[f"{name}.weight"] = gradients[f"{name}.weight"] - to_empty


def cycles_until(steps, warmup, period):
    """Cycles, each twice as long as the one before it, that so many updates need."""
    return max(1, math.ceil(math.log2(max(0, steps - warmup) / period + 1)))


def with_training(config, case):
    """The config with the optimizer and the schedule of a trajectory."""
    rates = case["lr_scheduler"]
    warmup, period = rates["warmup_updates"], int(rates["lr_period_updates"])
    cycles = cycles_until(case["steps"], warmup, period) if rates["t_mult"] == 2 else 1
    optimizer = {"name": "nag", "momentum": case["momentum"], "clip_norm": case["clip_norm"]}
    optimizer["decoupled_decay"] = case.get("weight_decay", 0.0)
    schedule = {
        "name": "cosine_cycles",
        "warmup_from": rates["warmup_init_lr"],
        "warmup_steps": warmup,
        "cycle_steps": period,
        "cycles": cycles,
        "shrink": rates["lr_shrink"],
    }
    [optimizer["learning_rate"]], schedule["min_learning_rate"] = rates["lr"], rates["min_lr"]
    steps = warmup + period * (2**cycles - 1)
    return resolve(config | {"steps": steps, "optimizer": optimizer, "schedule": schedule})
