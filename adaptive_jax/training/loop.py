"""The loop: corpus, model, optimizer, restore or start, then for each step one update, and log, evaluate, save when due."""

import math
import time
from pathlib import Path

import jax
import numpy as np

from adaptive_jax.data.batches.batching import Rows
from adaptive_jax.data.batches.prefetch import Ahead
from adaptive_jax.data.corpora import load as corpora
from adaptive_jax.devices import accelerators, hosts, sharding
from adaptive_jax.errors import InputError, check_known
from adaptive_jax.evaluation.scoring import score, summary
from adaptive_jax.model import build
from adaptive_jax.plans.costs import describe, plan, scale
from adaptive_jax.training import optim
from adaptive_jax.training.metrics import open_metrics, perplexity
from adaptive_jax.training.state import initial_state, shape_of_state
from adaptive_jax.training.update import make_update
from adaptive_jax.workdir.checkpoints import Checkpoints, begin, check_same_run, check_same_vocabulary, write_json


def due(step: int, every: int, steps: int) -> bool:
    """Whether something done every `every` updates is due after `step` of `steps`; everything is due at the end."""
    return step == steps or (every > 0 and step % every == 0)


def dry_run(config: dict, workdir: Path, memory: int) -> None:
    """Prints the plan of `config` for its published vocabulary, needing no corpus, and writes it to workdir/plan.json.

    memory: bytes of an accelerator, for `plan.scale`.
    """
    check_same_run(workdir, config)
    check_known(f"data.corpus={config['data']['corpus']!r}", config["data"]["corpus"], corpora.CORPORA)
    costs = plan(config, config["data"]["vocabulary_size"], jax.device_count())
    hosts.say(describe(costs))
    for line in scale(config, memory):
        hosts.say(line)
    if hosts.first():
        write_json(workdir / "plan.json", costs)


def train(config: dict, workdir: Path) -> None:
    """Trains to `config["steps"]` updates, from the workdir's last checkpoint if there is one.

    Raises:
        InputError: anything a user can cure; a loss that is not a number among it. Checkpoints stay as they are.
    """
    check_same_run(workdir, config)
    accelerators.keep_programs(Path(config["data"]["cache"]).expanduser())
    machine = jax.device_count(), accelerators.memory()
    plan(config, config["data"]["vocabulary_size"], *machine)  # fails on what does not fit, before any long work
    corpus = corpora.from_config(config["data"])
    vocabulary = corpus.vocabulary
    check_same_vocabulary(workdir, vocabulary)
    costs = plan(config, len(vocabulary), *machine)
    mesh = sharding.device_mesh(costs["fsdp"])
    hosts.say(describe(costs))
    begin(workdir, config, costs, vocabulary)

    data = config["data"]
    rows = Rows(corpus.ids["train"], vocabulary.eos, block=data["block"], break_mode=data["break_mode"], kind=data["rows"],
                rows=costs["rows_per_update"], parts=costs["accumulation"])  # fmt: skip
    hosts.say(f"rows         {rows}")
    model = build(config, vocabulary)
    optimizer, rate = optim.from_config(config["optimizer"])
    checkpoints = Checkpoints(workdir, config["keep"])
    if (step := checkpoints.latest()) is None:
        state = initial_state(model, optimizer, config["seed"], mesh)
    else:
        state = checkpoints.restore(step, shape_of_state(model, optimizer, mesh))
        hosts.say(f"continuing {workdir} after {step:,} of {config['steps']:,} updates")
    update = make_update(model, optimizer, rate, mesh, config["seed"])
    metrics = open_metrics(workdir, step or 0, config["steps"])
    run(config, costs, mesh, model, update, state, corpus, rows, checkpoints, metrics)


def run(config, costs, mesh, model, update, state, corpus, rows, checkpoints, metrics) -> None:
    """The loop itself, from `state` to the last update; closes `checkpoints` and `metrics`."""
    steps, data, ends, validation_ids = config["steps"], config["data"], corpus.vocabulary.ends, corpus.ids["validation"]
    share = jax.process_index(), jax.process_count()

    def batch(step):
        """This host's share of an update, on its devices, and the number of words of the text that end in it."""
        local = rows.batch(config["seed"], step - 1, share)
        words = int(np.sum(ends[local.targets] & (local.weights > 0)))
        return sharding.put_share(mesh, local, axis=1), words

    try:
        work = costs["flops_per_token"]["training"]
        window, numbers, programs = _Window(work), None, {}
        with Ahead(batch, range(int(state.step) + 1, steps + 1)) as batches, hosts.stopping() as stop:
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
                stopped = stop(step)
                evaluate, save = (due(step, config[key], steps) for key in ("evaluate_every", "checkpoint_every"))
                save = save or stopped
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
                    if stopped:
                        raise KeyboardInterrupt  # on all hosts
                    window = _Window(work)  # neither scoring nor saving counts in words a second
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
    """Means over the updates since the last log line; `work` is FLOPs a token."""

    def __init__(self, work: float):
        self.start, self.work = time.perf_counter(), work
        self.nll, self.words, self.waited, self.tokens, self.updates = 0.0, 0, 0.0, 0.0, 0
        self.last = {}

    def add(self, step, numbers, words):
        check_finite(step, loss=float(numbers["loss"]), gradient_norm=float(numbers["gradient_norm"]))
        self.nll += float(numbers["nll"]) * float(numbers["tokens"])
        self.tokens += float(numbers["tokens"])
        self.updates += 1
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
            "step_seconds": seconds / self.updates,
            "data_wait": self.waited / seconds,
            "learning_rate": float(self.last["learning_rate"]),
            "gradient_norm": float(self.last["gradient_norm"]),
        }
        utilisation = accelerators.utilisation(
            self.work * self.tokens, seconds, jax.device_count(), jax.devices()[0].device_kind
        )
        self.__init__(self.work)
        return report if utilisation is None else report | {"utilisation": utilisation}
