"""Training as GroC's public code trains: its tied model, its sparse updates and its finetuning,
update by update.

In the runs of groc the filters see letters as in the public code, see tests/reference/groc.py.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

from adaptive_jax.config.keys import complete
from adaptive_jax.data.vocabulary.lexicon import lexicon
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.model.gradients import make_gradients
from adaptive_jax.model.language_model import build
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.parallel import sharding
from adaptive_jax.training.sparse import optimizer
from tests.reference.groc import GROC, encoder_settings, of_code, option, settings_of_command
from tests.reference.sets import window


class Settings:
    """The settings of a case of `train`, and the flags of its command."""

    def __init__(self, case):
        self.name, self.case = case, GROC.about("train")["cases"][case]
        self.arrays = GROC.arrays("train", f"{case}/")
        command = self.case["command"]
        self.flags = dict(re.findall(r"--(\w+) (-?[\d.]+)", command))
        self.command = command
        self.composed = "--char_emb" in command or "_char_emb.weight" in self.case.get(
            "parameters", ()
        )

    def __getitem__(self, name):
        value = float(self.flags[name])
        return int(value) if value.is_integer() and name != "lr" else value

    def config(self, wordnet):
        """The config of the run, with lists of words from WordNet."""
        adam, width = GROC.settings("train", self.name)["adam"], self["emsize"]
        optimizer = {
            "name": "adam",
            "learning_rate": self["lr"],
            "epsilon": adam["eps"],
            "b1": adam["betas"][0],
            "b2": adam["betas"][1],
            "l2_decay": adam["weight_decay"],
            "clip_norm": self["clip"],
        }
        body = {
            "name": "awd_lstm",
            "features": width,
            "widths": (*[self["nhid"]] * (self["nlayers"] - 1), width),
            "biases": 2,
            "ar": option(self.command, "alpha"),
            "tar": option(self.command, "beta"),
        } | {name: 0.0 for name in ("input_dropout", "hidden_dropout", "dropout", "weight_drop")}
        groups = {"optimizer": optimizer, "body": body, "schedule": SCHEDULE}
        groups |= {"input": {"name": "lookup"}, "output": {"name": "softmax"}}
        table = {"name": "tied", "bias": True}
        if self.composed:
            # A finetuned model is that of the run before it.
            of = self.case if "conv_counts" in self.case else GROC_RUN
            encoder = encoder_settings(settings_of_command(of["command"], of))
            groups["input"] = {"name": "groc", "lexicon": wordnet} | encoder
            table = {"name": "mapped", "depth": 0, "bias": "predicted"}
        flat = {f"{group}.{key}": v for group, of in groups.items() for key, v in of.items()}
        flat |= {f"output.table.{key}": value for key, value in table.items()}
        share = float(self.flags.get("char_update_ratio", 1.0))
        return complete(flat, {"compose_share": share})


SCHEDULE = {"name": "constant", "warmup_steps": 0}
GROC_RUN = next(
    (c for c in GROC.about("train")["cases"].values() if "--char_emb" in c.get("command", "")), {}
)


def parameters(arrays, prefix):
    """Tensors of the public code by our names."""
    tensors = dict(arrays.under(prefix))
    kinds = {
        "weight_ih_l0": "input",
        "weight_hh_l0": "recurrent",
        "bias_ih_l0": "bias",
        "bias_hh_l0": "recurrent_bias",
    }
    params = {"input": {}, "body": {}, "output": {"table": {}}}
    params["input"] = of_code(tensors)
    for name, array in tensors.items():
        if name.startswith("_prefix_network"):
            _, layer, kind = name.split(".")
            params["body"][f"{kinds[kind]}_{layer}"] = array.T
    table = params["output"]["table"]
    if "_bias.weight" in tensors:
        table |= {"bias_weights": tensors["_bias.weight"].T, "bias": tensors["_bias.bias"][0]}
    else:
        params["input"]["table"] = tensors["_lookup.weight"]
        table["bias"] = tensors["_decoder.bias"]
        table |= {"table_0": tensors["_decoder.weight"]} if "_decoder.weight" in tensors else {}
    return jax.tree.map(jnp.asarray, params)


def split_of(domain, split):
    """The ids of a text."""
    about = GROC.about("cross_domain")
    index = {word: i for i, word in enumerate(about["vocabularies"][domain])}
    texts = [about["texts"][name] for name in about["directories"][domain][split]]
    lines = "".join(texts).removesuffix("\n").split("\n")
    return np.array([index[word] for line in lines for word in (*line.split(), "<eos>")])


def columns(ids, count):
    """The split as so many columns, `[time, columns]`; tokens that are left over are dropped."""
    return ids[: len(ids) // count * count].reshape(count, -1).T.astype(np.int32)


class Trajectory:
    """Training on given windows, which are padded to the longest; they are read padded to the
    columns of validation, too, by one program.
    """

    def __init__(self, settings, params, domain, wordnet):
        words = GROC.about("cross_domain")["vocabularies"][domain]
        config, self.settings = settings.config(str(wordnet)), settings
        self.longest, self.bptt = int(settings.arrays["seq"].max()), settings["bptt"]
        batches = settings.case.get("eval_batch", {"valid": settings["batch_size"]})
        self.columns = max(batches["valid"], settings["batch_size"])
        self.vocabulary, self.params = len(words), params
        self.model = build(config, len(words))
        known = Vocabulary(tuple(words), np.ones(len(words), np.int64))
        self.known = lexicon(known, self.model.lexicon_spec())
        self.mesh, self.tables = sharding.device_mesh(), {}
        self.ours = optax.with_extra_args_support(optimizer(config, self.model))
        self.state, self.programs = self.ours.init(params), {}
        self.gradients = make_gradients(self.model, self.mesh, 0, shares_tables=bool(self.known))

    def start(self):
        self.carry = self.model.body.initial_carry(self.columns)

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

    def still(self, *given):
        return self._update(True, *given)

    def _update(self, stored, params, state, carry, batch, scale, tables):
        carry = jax.tree.map(lambda a: a[None], carry)
        gradients, _, sums, tables = self.gradients(
            params, self.known, jnp.zeros((), jnp.int32), batch, carry, tables
        )
        gradients = jax.tree.map(lambda g: g / sums.tokens, gradients)
        changes, state = self.ours.update(gradients, state, params, scale=scale, stored=stored)
        return changes, state, (sums.nll / sums.tokens, optax.tree.norm(gradients)), tables

    def advance(self, source, start, rows, rate, tables=None):
        """Makes an update, with stored tables or, without, composing anew; its plain loss and
        gradient norm.
        """
        batch = window(source, start, rows, self.longest)
        scale = jnp.float32(rate / self.settings["lr"])
        if start == 0:
            self.start()
        carry = jax.tree.map(lambda a: a[: source.shape[1]], self.carry)
        given = self.params, self.state, carry, batch, scale, tables or {}
        changes, self.state, numbers, made = self.run(self.still if tables else self.anew, *given)
        self.tables = tables or made
        self.score(batch)
        self.params = self.apply(changes)
        return [float(number) for number in numbers]

    def score(self, batch):
        """The mean loss of a window, after which the carry is that of the next one."""
        _, columns, rows = batch.inputs.shape
        more = (0, self.columns - columns), (0, max(self.longest, self.bptt) - rows)
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
            range(0, len(source) - 1, self.bptt), tables or [{}] * len(source), strict=False
        ):
            self.tables = stored
            rows = min(self.bptt, len(source) - 1 - start)
            losses.append(self.score(window(source, start, rows, self.bptt)))
        return losses


def assert_same_parameters(ours, theirs, tolerance):
    """Those that the file has; entries to a share of the largest."""
    for group, arrays in theirs.items():
        for name, array in (arrays["table"] if group == "output" else arrays).items():
            mine = (ours[group]["table"] if group == "output" else ours[group])[name]
            np.testing.assert_allclose(
                mine, array, rtol=0, atol=tolerance * np.abs(array).max(), err_msg=name
            )
