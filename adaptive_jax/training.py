"""The loop: corpus, model, optimizer, restore or start, then for each step one update, and log, evaluate, save when due."""

import math
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from adaptive_jax import optim, sharding
from adaptive_jax.checkpoints import Checkpoints, check_same_run, check_same_vocabulary, write_json
from adaptive_jax.data import corpora
from adaptive_jax.data.batching import Batch, Rows
from adaptive_jax.data.prefetch import Ahead
from adaptive_jax.errors import InputError, check_known
from adaptive_jax.evaluation.scoring import score, summary
from adaptive_jax.metrics import Metrics, perplexity
from adaptive_jax.model import LanguageModel, build
from adaptive_jax.plan import describe, plan
from adaptive_jax.state import State, initial_state, shape_of_state


def make_update(model: LanguageModel, optimizer: optax.GradientTransformation, rate: optax.Schedule, mesh, seed: int):
    """Compiles one update.

    Returns:
        `update(state, batch) -> (state, numbers)`: `batch` is a `Batch` of `[accumulation, rows, time]`; gradients are summed
        over all tokens of the update and divided once by the sum of their weights. The state given is used up. `numbers`
        are scalars: `nll` (plain, nats a token, dropout on), `loss` (with regularisation), `learning_rate`,
        `gradient_norm` (before clipping), `tokens` (the sum of weights). Dropout is a function of the seed, the step, the
        batch within the update and, for the tails, the device: another accumulation or number of devices draws other masks.
    """
    input_vectors, output_loss = sharding.local_input(model, mesh), sharding.local_loss(model, mesh)

    def batch_loss(params, batch, key):
        body_key, output_key = jax.random.split(key)
        vectors = input_vectors(params, batch.inputs)
        hidden = model.apply(
            {"params": params}, vectors, batch.segments, train=True, method="continued", rngs={"dropout": body_key}
        )
        loss, nll = output_loss(params, hidden, batch.targets, batch.weights, output_key)
        return loss, jnp.sum(nll * batch.weights)

    def update(state: State, batch: Batch):
        key = jax.random.fold_in(jax.random.key(seed), state.step)

        def add(total, part):
            number, batch = part
            (loss, nll), gradients = jax.value_and_grad(batch_loss, has_aux=True)(
                state.params, batch, jax.random.fold_in(key, number)
            )
            return jax.tree.map(jnp.add, total, (gradients, loss, nll, jnp.sum(batch.weights))), None

        zeros = (jax.tree.map(jnp.zeros_like, state.params), 0.0, 0.0, 0.0)
        (gradients, loss, nll, tokens), _ = jax.lax.scan(add, zeros, (jnp.arange(len(batch.inputs)), batch))
        gradients = jax.tree.map(lambda g: g / tokens, gradients)
        changes, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        numbers = {
            "nll": nll / tokens,
            "loss": loss / tokens,
            "learning_rate": rate(state.step),
            "gradient_norm": optax.global_norm(gradients),
            "tokens": tokens,
        }
        return State(state.step + 1, optax.apply_updates(state.params, changes), optimizer_state), numbers

    whole = sharding.whole(mesh)
    return jax.jit(update, donate_argnums=0, in_shardings=(whole, sharding.cut(mesh, 1)), out_shardings=whole)


def due(step: int, every: int, steps: int) -> bool:
    """Whether something done every `every` updates is due after `step` of `steps`; everything is due at the end."""
    return step == steps or (every > 0 and step % every == 0)


def dry_run(config: dict, workdir: Path) -> None:
    """Prints the plan of `config` for its published vocabulary, needing no corpus, and writes it to workdir/plan.json."""
    check_same_run(workdir, config)
    check_known(f"data.corpus={config['data']['corpus']!r}", config["data"]["corpus"], corpora.CORPORA)
    costs = plan(config, config["data"]["vocabulary_size"], jax.device_count())
    print(describe(costs), flush=True)
    write_json(workdir / "plan.json", costs)


def train(config: dict, workdir: Path) -> None:
    """Trains to `config["steps"]` updates, from the workdir's last checkpoint if there is one.

    Raises:
        InputError: anything a user can cure; a loss that is not a number among it. Checkpoints stay as they are.
    """
    mesh = sharding.data_mesh()
    check_same_run(workdir, config)
    plan(config, config["data"]["vocabulary_size"], mesh.size)  # fails on what does not fit, before any long work
    corpus = corpora.from_config(config["data"])
    vocabulary = corpus.vocabulary
    check_same_vocabulary(workdir, vocabulary)
    costs = plan(config, len(vocabulary), mesh.size)
    print(describe(costs), flush=True)
    workdir.mkdir(parents=True, exist_ok=True)
    vocabulary.write(workdir / "vocabulary.txt")
    write_json(workdir / "plan.json", costs)
    write_json(workdir / "config.json", config)

    data = config["data"]
    rows = Rows(corpus.ids["train"], vocabulary.eos, block=data["block"], break_mode=data["break_mode"], kind=data["rows"],
                rows=costs["rows_per_update"], parts=costs["accumulation"])  # fmt: skip
    print(f"rows         {rows}", flush=True)
    model = build(config, vocabulary)
    optimizer, rate = optim.from_config(config["optimizer"])
    checkpoints = Checkpoints(workdir, config["keep"])
    if (step := checkpoints.latest()) is None:
        state = initial_state(model, optimizer, config["seed"], mesh)
    else:
        state = checkpoints.restore(step, shape_of_state(model, optimizer, mesh))
        print(f"continuing {workdir} after {step:,} of {config['steps']:,} updates", flush=True)
    update = make_update(model, optimizer, rate, mesh, config["seed"])
    run(config, mesh, model, update, state, corpus, rows, checkpoints, Metrics(workdir, step or 0, config["steps"]))


def run(config, mesh, model, update, state, corpus, rows, checkpoints, metrics) -> None:
    """The loop itself, from `state` to the last update; closes `checkpoints` and `metrics`."""
    steps, data, ends, validation_ids = config["steps"], config["data"], corpus.vocabulary.ends, corpus.ids["validation"]
    share = jax.process_index(), jax.process_count()

    def batch(step):
        """This host's share of an update, on its devices, and the number of words of the text that end in it."""
        local = rows.batch(config["seed"], step - 1, share)
        words = int(np.sum(ends[local.targets] & (local.weights > 0)))
        return sharding.put_share(mesh, local, axis=1), words

    try:
        window, numbers, programs = _Window(), None, {}
        with Ahead(batch, range(int(state.step) + 1, steps + 1)) as batches:
            for step, (arrays, words) in batches:
                if (shape := arrays.inputs.shape) in programs:
                    window.waited += batches.waited
                else:
                    start = time.perf_counter() - batches.waited
                    programs[shape] = update.lower(state, arrays).compile()
                    window.start += time.perf_counter() - start  # getting under way counts neither as waiting nor as work
                with jax.transfer_guard("disallow"):
                    state, following = programs[shape](state, arrays)
                # The step is under way; now there is time to read the numbers of the one before.
                if numbers is not None:
                    window.add(step - 1, *jax.device_get(numbers))
                numbers = following, words
                evaluate, save = (due(step, config[key], steps) for key in ("evaluate_every", "checkpoint_every"))
                if evaluate or save or due(step, config["log_every"], steps):
                    window.add(step, *jax.device_get(numbers))
                    numbers = None
                    metrics.write(step, "train", window.close())
                metrics.advance(step)
                if evaluate or save:
                    nll = score(model, state.params, mesh, validation_ids, corpus.vocabulary.eos, window=data["block"],
                                context=0, rows=rows.per_batch, break_mode=data["break_mode"], kind=data["rows"])  # fmt: skip
                    validation = summary(nll, validation_ids, corpus.vocabulary)
                    check_finite(step, validation=validation["nll"])
                    metrics.write(step, "validation", {key: validation[key] for key in ("nll", "perplexity")})
                    if save:
                        checkpoints.save(step, state, validation["nll"])
                    window = _Window()  # neither scoring nor saving counts in words a second
    finally:
        metrics.close()
        checkpoints.close()


def check_finite(step: int, **numbers: float) -> None:
    """Stops a run that has diverged, before anything of it is saved.

    Raises:
        InputError: with the step, the numbers and the cure.
    """
    if not all(map(math.isfinite, numbers.values())):
        shown = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in numbers.items())
        raise InputError(
            f"update {step:,} gives {shown}: lower optimizer.learning_rate or lengthen optimizer.warmup_steps, and train in a "
            "new --workdir; the checkpoints saved before are whole"
        )


class _Window:
    """Means over the updates since the last log line."""

    def __init__(self):
        self.start = time.perf_counter()
        self.nll, self.words, self.waited = 0.0, 0, 0.0
        self.last = {}

    def add(self, step, numbers, words):
        check_finite(step, loss=float(numbers["loss"]), gradient_norm=float(numbers["gradient_norm"]))
        self.nll += float(numbers["nll"]) * float(numbers["tokens"])
        self.words += words
        self.last = numbers

    def close(self):
        seconds = time.perf_counter() - self.start
        words = sharding.over_hosts(self.words)
        # One word may be longer than a batch.
        nll = self.nll / words if words else math.inf
        report = {
            "nll": nll,
            "perplexity": perplexity(nll),
            "words_per_second": words / seconds,
            "data_wait": self.waited / seconds,
            "learning_rate": float(self.last["learning_rate"]),
            "gradient_norm": float(self.last["gradient_norm"]),
        }
        self.__init__()
        return report
