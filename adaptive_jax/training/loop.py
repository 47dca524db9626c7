"""The loop: corpus, model, optimizer, restore or start; then for each step one update, and log, evaluate, save when due."""

import functools
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from adaptive_jax.data.batches.prefetch import Ahead
from adaptive_jax.data.batches.training import Layout, TrainingBatches
from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.data.corpora.corpus import Corpus
from adaptive_jax.data.corpora.load import CORPORA, load
from adaptive_jax.devices import accelerators, hosts, sharding
from adaptive_jax.errors import check_known
from adaptive_jax.evaluation.runs import Run, put_lexicon
from adaptive_jax.evaluation.scoring import plain, summary
from adaptive_jax.model import build
from adaptive_jax.plans.costs import Plan, describe, divide_update, dry_run_lines, make_plan
from adaptive_jax.training import optim
from adaptive_jax.training.intervals import Interval, check_finite
from adaptive_jax.training.metrics import open_metrics
from adaptive_jax.training.state import State, initial_state, restored_state, shape_of_state
from adaptive_jax.training.update import make_update
from adaptive_jax.workdir.checkpoints import Checkpoints
from adaptive_jax.workdir.settings import begin, check_same_run, check_same_vocabulary, write_json

VALIDATED = ("evaluate_every", "checkpoint_every")  # a checkpoint needs a validation loss, so that the best one is known


def due(step: int, every: int, steps: int) -> bool:
    """Whether something done every `every` updates is due after `step` of `steps`; everything is due at the end."""
    return step == steps or (every > 0 and step % every == 0)


def dry_run(config: dict, workdir: Path, memory: int) -> None:
    """Prints the plan of `config` for its published vocabulary, without its corpus, and writes it to workdir/plan.json.

    memory: bytes of an accelerator, for the lines about 8, 32 and 64 of them.
    """
    check_same_run(workdir, config)
    check_known(f"data.corpus={config['data']['corpus']!r}", config["data"]["corpus"], CORPORA)
    plan, lines = dry_run_lines(config, jax.device_count(), memory)
    hosts.say("\n".join(lines))
    if plan is not None and hosts.first():
        write_json(workdir / "plan.json", plan._asdict())


class Job(NamedTuple):
    """What the loop works with."""

    config: dict
    plan: Plan
    run: Run  # the model; its parameters are None, as those of the state change
    corpus: Corpus
    batches: TrainingBatches
    optimizer: optim.Optimizer
    checkpoints: Checkpoints


def train(config: dict, workdir: Path) -> None:
    """Trains to `config["steps"]` updates, from the workdir's last checkpoint if there is one.

    Raises:
        InputError: anything a user can cure, a loss that is not finite among it. Checkpoints stay as they are.
    """
    check_same_run(workdir, config)
    accelerators.keep_programs(Path(config["data"]["cache"]).expanduser())
    _check(config)
    corpus = load(config["data"])
    vocabulary, layout = corpus.vocabulary, Layout(**config["batches"])
    check_same_vocabulary(workdir, vocabulary)
    plan = make_plan(config, len(vocabulary), jax.device_count(), accelerators.memory())
    mesh = sharding.device_mesh(plan.fsdp)
    hosts.say(describe(plan))
    begin(workdir, config, plan._asdict(), vocabulary)

    batches = TrainingBatches(corpus.ids["train"], vocabulary.eos, layout, plan.rows_per_update, plan.accumulation)
    hosts.say(f"rows         {batches}")
    model, optimizer = build(config, len(vocabulary)), optim.from_config(config)
    run = Run(model, None, put_lexicon(model, vocabulary, mesh), mesh, vocabulary, config, 0)
    checkpoints = Checkpoints(workdir, config["keep"])
    step = checkpoints.latest()
    shapes = shape_of_state(model, optimizer, mesh)
    if step is None:
        state = initial_state(model, optimizer, config["seed"], mesh)
    else:
        state = restored_state(shapes, step, functools.partial(checkpoints.restore, step))
        hosts.say(f"continuing {workdir} after {step:,} of {config['steps']:,} updates")
    metrics = open_metrics(workdir, step or 0, config["steps"])
    update = make_update(model, optimizer, mesh, config["seed"], shapes)
    loop(Job(config, plan, run, corpus, batches, optimizer, checkpoints), update, state, metrics)


def _check(config):
    """Finds what is wrong with layers, optimizer, schedule or update before a long preparation of the corpus."""
    cutoffs = *config["input"].get("cutoffs", ()), *config["output"]["table"].get("cutoffs", ())
    build(config, max([config["data"]["vocabulary_size"], *(cut + 1 for cut in cutoffs if isinstance(cut, int)), 2]))
    optim.from_config(config)
    divide_update(config, jax.device_count())


def loop(job: Job, update, state: State, metrics) -> None:
    """Updates from `state` to the last one; closes the checkpoints and `metrics`."""
    config, steps, ends = job.config, job.config["steps"], job.corpus.vocabulary.ends
    share = jax.process_index(), jax.process_count()

    def batch(step):
        """This host's share of an update, on its devices, and the number of words of the text that end in it."""
        local = job.batches.batch(config["seed"], step - 1, share)
        words = int(np.sum(ends[local.targets] & (local.weights > 0)))
        return sharding.put_host_share(job.run.mesh, local, axis=1), words

    def validate(state, step):
        """The validation loss in nats a word, and the state after the optimizer has been told of it."""
        nll = _validation_nll(job, state, step, metrics)
        optimizer_state = job.optimizer.after_evaluation(state.optimizer, nll)
        return nll, state._replace(optimizer=optimizer_state)

    try:
        first = int(state.step)
        # A run that was stopped saved its state first, and left out an evaluation that was due.
        if first and any(due(first, config[key], steps) for key in VALIDATED) and not job.checkpoints.evaluated(first):
            _, state = validate(state, first)
        interval, before, programs = Interval(job.plan.flops_per_token["training"]), None, {}
        with Ahead(batch, range(first + 1, steps + 1)) as batches, hosts.stopping() as stop:
            for step, (arrays, words) in batches:
                if (shape := arrays.inputs.shape) in programs:
                    interval.waited += batches.waited
                else:
                    start = time.perf_counter() - batches.waited
                    programs[shape] = update.lower(state, job.run.lexicon, arrays).compile()
                    interval.start += time.perf_counter() - start  # starting up counts neither as waiting nor as work
                with jax.transfer_guard("disallow"):
                    state, following = programs[shape](state, job.run.lexicon, arrays)
                # The step has been dispatched; now there is time to read the metrics of the one before.
                if before is not None:
                    interval.add(step - 1, *jax.device_get(before))
                before, stopped = (following, words), stop(step)
                evaluate, save = (due(step, config[key], steps) for key in VALIDATED)
                if evaluate or save or stopped or due(step, config["log_every"], steps):
                    interval.add(step, *jax.device_get(before))
                    before = None
                    metrics.write(step, "train", interval.close())
                metrics.advance(step)
                if stopped:
                    job.checkpoints.save(step, state.items(), None)
                    raise KeyboardInterrupt  # on all hosts
                if evaluate or save:
                    nll, state = validate(state, step)
                    if save:
                        job.checkpoints.save(step, state.items(), nll)
                    interval = Interval(interval.work)  # neither scoring nor saving counts in words a second
    finally:
        metrics.close()
        job.checkpoints.close()


def _validation_nll(job, state, step, metrics):
    """Scores the validation split, records the result and returns the loss in nats a word."""
    ids, vocabulary = job.corpus.ids["validation"], job.corpus.vocabulary
    length, break_mode, layout = Layout(**job.config["batches"])
    params = job.optimizer.params_to_evaluate(state.optimizer, state.params)
    settings = Windows(length, 0, break_mode, layout, job.batches.per_microbatch)
    nll = plain(job.run._replace(params=params, step=step), ids, settings, lambda batches, count: batches)
    result = summary(nll, ids, vocabulary)
    check_finite(step, validation=result["nll"])
    metrics.write(step, "validation", {key: result[key] for key in ("nll", "perplexity")})
    return result["nll"]
