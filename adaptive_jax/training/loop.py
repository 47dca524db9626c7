"""The loop: corpus, model, optimizer, restore or start; then for each step one update, and log,
evaluate, save when due.
"""

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax

from adaptive_jax.config.keys import resolve
from adaptive_jax.data.batches.pipeline import Layout, TrainingBatches
from adaptive_jax.data.batches.prefetch import Prefetcher
from adaptive_jax.data.corpora.corpus import Corpus
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.vocabulary.lexicon import check_lexicon, lexicon_of
from adaptive_jax.data.vocabulary.token_ids import check_ends
from adaptive_jax.errors import InputError
from adaptive_jax.evaluation.runs import Run, put_lexicon
from adaptive_jax.evaluation.unseen import describe_words
from adaptive_jax.model.language_model import build
from adaptive_jax.optimizers import optim
from adaptive_jax.parallel import accelerators, hosts, sharding
from adaptive_jax.planning.plan import Plan, check_memory, describe
from adaptive_jax.training import sparse, writers
from adaptive_jax.training.compiled import plan_update
from adaptive_jax.training.divergence import Diverged, Rewinds, Watch
from adaptive_jax.training.dry_run import check_config
from adaptive_jax.training.ends import Clock, due, reason, validates
from adaptive_jax.training.finetuning import check_fits, finetuned, vocabulary_for
from adaptive_jax.training.intervals import Interval
from adaptive_jax.training.metrics import Metrics, NoMetrics, open_metrics
from adaptive_jax.training.own_text import with_text
from adaptive_jax.training.state import (
    State,
    initial_state,
    parameter_names,
    restored_state,
    shape_of_state,
)
from adaptive_jax.training.update import Extras, make_update
from adaptive_jax.training.validation import validation_nll
from adaptive_jax.workdir.checkpoints import Checkpoints
from adaptive_jax.workdir.lock import locked
from adaptive_jax.workdir.settings import (
    at_clusters,
    begin,
    check_same_run,
    check_same_vocabulary,
    with_origin,
    with_own_files,
    write_published,
)


class Job(NamedTuple):
    """What the loop works with."""

    config: dict
    plan: Plan
    run: Run  # the model; its parameters are None, as those of the state change
    corpus: Corpus
    batches: TrainingBatches
    optimizer: optax.GradientTransformationExtraArgs
    rewinds: Rewinds
    stop: hosts.Stop


class Stopped(KeyboardInterrupt):
    """Raised on every host after the same update when a stop was requested; the message says what
    was saved.
    """


def train(
    config: dict, workdir: Path, published: tuple[dict | None, Sequence[str]] = (None, ())
) -> None:
    """Trains to `config["steps"]` updates, from the workdir's last checkpoint if there is one.

    published: the arguments of `write_published`, for evaluations to show.

    Raises:
        InputError: anything a user can cure, an update that diverges among it. What was saved
            stays.
        Stopped: a stop was requested; the message says what was saved.
    """
    given = at_clusters(with_origin(with_text(resolve(config), workdir), workdir), workdir)
    check_same_run(workdir, given)
    config = with_own_files(given, workdir)
    accelerators.keep_programs(config["data"]["cache"])
    check_config(config, jax.device_count())
    check_lexicon(lexicon_of(config))
    corpus = load(config["data"])
    vocabulary = vocabulary_for(given, workdir, corpus.vocabulary)
    layout = Layout(**config["batches"])
    if vocabulary is not corpus.vocabulary:
        corpus = load(config["data"], vocabulary=vocabulary)
    check_ends(vocabulary, layout.break_mode)
    check_same_vocabulary(workdir, vocabulary)
    memory = accelerators.memory()
    plan, _ = plan_update(config, len(vocabulary), jax.devices(), memory)
    check_memory(plan, memory or accelerators.installed())
    mesh = sharding.device_mesh(plan.fsdp)
    hosts.say(describe(plan))
    sizes = plan.rows_per_update, plan.accumulation
    batches = TrainingBatches(corpus.ids["train"], vocabulary.eos, layout, *sizes)
    hosts.say(f"rows         {batches}")
    unit, said = vocabulary.unit, describe_words(corpus, "validation")
    said += "; losses and perplexities are per token" if unit == "token" else ""
    hosts.say(f"{unit + 's':<13}of the validation split: {said}")
    model = build(config, len(vocabulary))
    optimizer = sparse.optimizer(config, model)
    check_fits(given, workdir, model)
    lexicon = put_lexicon(model, vocabulary, mesh)
    run = Run(model, None, lexicon, mesh, vocabulary, config, 0)
    with locked(workdir), hosts.stopping("this update is finished and saved first") as stop:
        begin(workdir, given, plan._asdict(), vocabulary)
        write_published(workdir, *published)
        job = Job(config, plan, run, corpus, batches, optimizer, Rewinds(workdir), stop)
        while True:
            try:
                return _run(job, workdir)
            except Diverged as diverged:
                if config["divergence"]["policy"] != "rewind":
                    raise
                _rewind(job, workdir, diverged)


def _rewind(job, workdir, diverged):
    checkpoints = Checkpoints(workdir, job.config["keep"], job.config["keep_every_hours"])
    # That state was saved when the run was stopped, before it was evaluated.
    if checkpoints.latest() == diverged.step:
        checkpoints.set_aside(diverged.step, diverged.what)
    saved = checkpoints.latest() or 0
    checkpoints.close()
    if job.stop.asked:
        raise Stopped(
            f"stopped: update {diverged.step:,} gives {diverged.what}; the same command goes on"
            f" from update {saved:,}"
        )
    job.rewinds.add(diverged, saved, job.config["divergence"]["rewinds"])


class Record(NamedTuple):
    """What a run has been so far: its checkpoints, its metrics, its validation losses by
    update, in nats a word, its hours.
    """

    checkpoints: Checkpoints
    metrics: Metrics | NoMetrics
    losses: dict[int, float]
    clock: Clock


def _run(job: Job, workdir: Path) -> None:
    """Restores or starts, and trains to the end."""
    config, mesh, streams = job.config, job.run.mesh, job.config["batches"]["layout"] == "streams"
    rows = (job.plan.accumulation, job.batches.per_microbatch) if streams else None
    how = {"rows": rows, "sparse": config["compose_share"] < 1}
    shapes = shape_of_state(job.run.model, job.optimizer, mesh, **how)
    checkpoints = Checkpoints(workdir, config["keep"], config["keep_every_hours"])
    step = checkpoints.latest()
    if step is None:
        state = initial_state(job.run.model, job.optimizer, config["seed"], mesh, **how)
        if config["init_from"]:
            state = finetuned(
                config, state, job.run.model, job.optimizer, (job.corpus.vocabulary, mesh)
            )
    else:
        if step > config["steps"]:
            raise InputError(
                f"{workdir} has done {step:,} updates, more than steps={config['steps']:,}: give"
                f" steps={step} or more, or another --workdir"
            )
        state = restored_state(shapes, step, functools.partial(checkpoints.restore, step))
        hosts.say(f"continuing {workdir} after {step:,} of {config['steps']:,} updates")
    # Read by every host, from the disk that they share: all must end early after the same update.
    lines = writers.recorded(workdir, step or 0)
    losses = {
        line["step"]: line["validation/nll"]
        for line in lines
        if line.get("validation/nll") is not None
    }
    clock = Clock(config["hours"], checkpoints.hours(step) if step else 0.0)
    metrics = open_metrics(workdir, step or 0, config, clock.left())
    extras = Extras.from_config(config)
    of = job.run.model, job.optimizer, mesh, config["seed"], shapes
    updates = [
        make_update(*of, extras._replace(stored=stored))
        for stored in ((False, True) if how["sparse"] else (False,))
    ]
    loop(job, updates, state, Record(checkpoints, metrics, losses, clock))


def loop(job: Job, updates: Sequence, state: State, record: Record) -> None:
    """Updates from `state` to the last one; closes the record.

    updates: one that composes word vectors anew and, with sparse updates, one that does not.
    """
    config, steps, (checkpoints, metrics, losses, clock) = job.config, job.config["steps"], record
    names = parameter_names(state.params)
    watch = Watch(config["divergence"], names)

    def read(step, metrics_and_words):
        """Reads an update's metrics from the device, checks them and adds them to the interval."""
        fetched, words = jax.device_get(metrics_and_words)
        interval.add(fetched, words, watch.see(step, fetched))

    def validate(state, step):
        """The validation loss in nats a word, None if stopped meanwhile, and the state, `told`
        of it.
        """
        nll = validation_nll(job, state, step, metrics)
        if nll is None:
            return None, state
        losses[step] = nll
        return nll, told(state, step, nll)

    def told(state, step, nll):
        """The state after the optimizer was told of an evaluation, unless that is due for
        another reason than `evaluate_every`.
        """
        if not due(step, config["evaluate_every"]):
            return state
        return state._replace(optimizer=optim.after_evaluation(state.optimizer, nll))

    def why(state, step, late):
        return reason(config, step, list(losses.values()), late, optim.ended(state.optimizer))

    def end(step, state):
        checkpoints.save(step, state.items(), None, clock.hours())
        checkpoints.verify()
        raise Stopped(
            f"stopped after update {step:,} of {steps:,}, which is saved: the same command resumes"
        )

    def finish(step, reason):
        checkpoints.verify()
        metrics.finish(step, reason)

    together = True
    try:
        first = int(state.step)
        late = first > 0 and clock.over()
        # A run that was stopped saved its state first, and left out an evaluation that was due.
        if (
            first
            and any(validates(config, first, late or first == steps))
            and not checkpoints.evaluated(first)
        ):
            nll, state = validate(state, first)
            if nll is not None:
                checkpoints.record_loss(first, nll)
        elif first and (nll := checkpoints.recorded_loss(first)) is not None:
            state = told(state, first, nll)
        if job.stop.asked:
            raise Stopped(f"stopped after update {first:,} of {steps:,}: the same command resumes")
        if over := why(state, first, late):
            return finish(first, over)
        interval, before, programs = Interval(job.plan.flops_per_token, names), None, {}
        with Prefetcher(functools.partial(_batch, job), range(first + 1, steps + 1)) as batches:
            for step, (arrays, words) in batches:
                stored = not sparse.composes(config["seed"], step, config["compose_share"])
                if (kind := (stored, arrays.inputs.shape)) in programs:
                    interval.waited += batches.waited
                else:
                    start = time.perf_counter() - batches.waited
                    programs[kind] = updates[stored].lower(state, job.run.lexicon, arrays).compile()
                    # Starting up counts neither as waiting nor as work.
                    interval.start += time.perf_counter() - start
                with jax.transfer_guard("disallow"):
                    state, following = programs[kind](state, job.run.lexicon, arrays)
                # The step has been dispatched; now there is time to read the metrics of the one
                # before.
                if before is not None:
                    read(step - 1, before)
                before, stopped, last = (following, words), job.stop(step), step == steps
                log = any(validates(config, step, last)) or due(step, config["log_every"], last)
                late = clock.over(together=log)
                evaluate, save = validates(config, step, last or late)
                if log or evaluate or stopped:
                    read(step, before)
                    before = None
                    metrics.write(step, "train", interval.close())
                metrics.advance(step)
                if stopped:
                    end(step, state)
                if evaluate:
                    nll, state = validate(state, step)
                    if nll is None:
                        end(step, state)
                    over = why(state, step, late)
                    if save or over:
                        checkpoints.save(step, state.items(), nll, clock.hours())
                    if over:
                        return finish(step, over)
                    # Neither scoring nor saving counts in words a second.
                    interval = Interval(interval.work, names)
    except (Diverged, Stopped):  # on all hosts
        raise
    except BaseException:
        together = not jax.distributed.is_initialized()
        raise
    finally:
        metrics.close()
        if together:  # otherwise the others would not answer
            checkpoints.close()


def _batch(job, step):
    """This host's share of an update, on its devices, and the number of words of the text that
    end in it.
    """
    share = jax.process_index(), jax.process_count()
    left_out = job.rewinds.left_out(step)
    local = job.batches.batch(job.config["seed"], step - 1 + left_out, share)
    # Batches were left out in between, so the carry is that of other text.
    if local.reset is not None and left_out != job.rewinds.left_out(step - 1):
        local = local._replace(reset=np.ones_like(local.reset))
    words = int(np.sum(job.corpus.vocabulary.ends[local.targets] & (local.weights > 0)))
    return sharding.put_host_share(job.run.mesh, local, axis=1), words
