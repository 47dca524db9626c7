"""The loop: corpus, model, optimizer, restore or start; then for each step one update, and log,
evaluate, save when due.
"""

import functools
import itertools
import math
import time
from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax

from adaptive_jax.config import signals
from adaptive_jax.config.keys import resolve
from adaptive_jax.data.batches.layouts import scored_break_mode
from adaptive_jax.data.batches.pipeline import Layout, TrainingBatches
from adaptive_jax.data.batches.prefetch import Prefetcher
from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.data.corpora.corpus import Corpus
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.vocabulary.lexicon import check_lexicon, lexicon_of
from adaptive_jax.data.vocabulary.token_ids import check_ends
from adaptive_jax.errors import InputError
from adaptive_jax.optimizers import optim
from adaptive_jax.parallel import accelerators, hosts, sharding
from adaptive_jax.planning.plan import Plan, check_memory, describe
from adaptive_jax.runs.checkpoints import Checkpoints, steps_in
from adaptive_jax.runs.identity import ID, check_hosts, check_resumes, id_of, of_corpus
from adaptive_jax.runs.lock import Lock, locked
from adaptive_jax.runs.run import Run, put_lexicon
from adaptive_jax.runs.start import begin, write_ngrams, write_published
from adaptive_jax.scores.scores import Scores
from adaptive_jax.scores.scoring import score_split
from adaptive_jax.scores.unseen import describe_words
from adaptive_jax.training import sparse
from adaptive_jax.training.compiled import plan_update
from adaptive_jax.training.divergence import Diverged, DivergenceMonitor
from adaptive_jax.training.dry_run import checked
from adaptive_jax.training.ends import Clock, due, reason, validates
from adaptive_jax.training.finetuning import finetuned, vocabulary_for
from adaptive_jax.training.metrics import Interval, Metrics
from adaptive_jax.training.programs import Programs
from adaptive_jax.training.state import (
    initial_state,
    parameter_names,
    restored_state,
    shape_of_state,
)
from adaptive_jax.training.update import UpdateOptions, make_update

# Updates after which several hosts compare their hours, also where they log less often
CLOCK_EVERY = 100


class Job(NamedTuple):
    """Parts of a run in training."""

    config: dict
    plan: Plan
    run: Run  # the model; its parameters are those of the state
    corpus: Corpus
    batches: TrainingBatches
    optimizer: optax.GradientTransformationExtraArgs
    stop: hosts.Stop
    lock: Lock


class Stopped(KeyboardInterrupt):
    """Raised on every host after the same update when a stop was requested; the message says what
    was saved.
    """

    status = signals.SAVED


def train(
    config: dict, workdir: Path, published: tuple[dict | None, Sequence[str]] = (None, ())
) -> None:
    """Trains to `config["steps"]` updates, from the workdir's last checkpoint if there is one.

    published: the last arguments of `write_published`, for evaluations to show.

    Raises:
        InputError: an error that a user can fix, or an update that diverges. Checkpoints stay.
        Stopped: a stop was requested; the message says what was saved.
    """
    checks = checked(resolve(config), workdir, jax.device_count())
    config = checks.config
    check_lexicon(lexicon_of(config))
    accelerators.keep_programs()
    corpus = _load_corpus(checks, workdir)
    vocabulary, memory = corpus.vocabulary, accelerators.memory()
    parts = checks.parts_for(len(vocabulary))
    plan, _ = plan_update(config, parts, jax.devices(), memory)
    check_memory(
        plan, memory or accelerators.memory_of_machine(plan.devices // jax.process_count())
    )
    mesh = sharding.device_mesh(plan.fsdp, count=plan.devices)
    hosts.log0(describe(plan, config["data"]))
    sizes = plan.rows_per_update, plan.accumulation, plan.devices
    layout = Layout(**config["batches"])
    batches = TrainingBatches(corpus.ids["train"], vocabulary.eos, layout, *sizes)
    hosts.log0(f"rows         {batches}")
    unit, description = vocabulary.unit, describe_words(corpus, "validation")
    description += "; losses and perplexities are per token" if unit == "token" else ""
    hosts.log0(f"{unit + 's':<13}of the validation split: {description}")
    stopping = hosts.stopping("this update is finished and saved first")
    with locked(workdir) as lock, stopping as stop:
        updates = max(steps_in(workdir / "checkpoints"), default=0)
        if updates > config["steps"]:
            raise InputError(
                f"{workdir} has a checkpoint of {updates:,} updates, more than"
                f" steps={config['steps']:,}: use steps={updates} or more, or another --workdir"
            )
        if hosts.first():
            write_ngrams(workdir, checks.saved_config, vocabulary, corpus.ids["train"])
        hosts.barrier("the n-grams")
        lexicon = put_lexicon(parts.model, vocabulary, mesh, hosts.log0)
        run = Run(workdir, checks.saved_config, vocabulary)
        run = run.with_parts(config=config, model=parts.model, mesh=mesh, lexicon=lexicon)
        begin(workdir, checks.saved_config, plan._asdict(), corpus)
        row, changed = published
        # A run resumes without --init_from, so the flags may not show it.
        changed = [*changed, *["init_from"] * bool(config["init_from"])]
        write_published(workdir, config, row, changed)
        job = Job(config, plan, run, corpus, batches, parts.optimizer, stop, lock)
        Training(job, workdir).run()


def _load_corpus(checks, workdir):
    """The corpus in the vocabulary of the run. Raises InputError: it is not that of the run that
    has begun, hosts differ in it, or it does not say where examples end.
    """
    config = checks.config
    corpus = load(config["data"])
    vocabulary = vocabulary_for(checks.saved_config, workdir, corpus.vocabulary)
    if vocabulary is not corpus.vocabulary:
        corpus = load(config["data"], vocabulary=vocabulary)
    check_ends(vocabulary, config["batches"]["break_mode"], "batches.break_mode")
    if not (workdir / "config.json").exists():  # a run that has begun cannot change it
        check_ends(vocabulary, scored_break_mode(config), "evaluate_break_mode")
    check_hosts(checks.saved_config, corpus)
    check_resumes(workdir, of_corpus(corpus))
    return corpus


class Training:
    """A run from its last checkpoint, or its start, to its end.

    Attributes:
        id: see `identity.id_of`.
        state: the current state.
        first_step: updates that earlier processes did.
        checkpoints, metrics, clock: what the run has saved and logged, and its time so far.
    """

    def __init__(self, job: Job, workdir: Path):
        self.job, config, model, mesh = job, job.config, job.run.model, job.run.mesh
        shared = config["compose_share"] < 1
        rows = None
        if config["batches"]["layout"] == "streams":
            rows = job.plan.accumulation, job.batches.per_microbatch
        shapes = shape_of_state(model, job.optimizer, mesh, rows, sparse=shared)
        self.id, self.checkpoints = id_of(workdir), Checkpoints(workdir, config["keep"])
        step = self.checkpoints.latest()
        if step is None:
            self.state = initial_state(model, job.optimizer, config["seed"], shapes)
            if config["init_from"]:
                self.state = finetuned(
                    config, self.state, model, job.optimizer, job.corpus.vocabulary, mesh
                )
        else:
            restore = functools.partial(self.checkpoints.restore, step)
            self.state = restored_state(shapes, step, restore)
            hosts.log0(f"continuing {workdir} after {step:,} of {config['steps']:,} updates")
        self.first_step = step or 0
        self.clock = Clock(config["hours"], self.checkpoints.hours(step) if step else 0.0)
        unit = job.corpus.vocabulary.unit
        self.metrics = Metrics(workdir, self.first_step, config, unit, self.clock.left())
        self.monitor = DivergenceMonitor(parameter_names(self.state.params))
        options = UpdateOptions.from_config(config)
        # One update composes word vectors anew; with sparse updates, another one does not.
        self.updates = [
            make_update(
                model, job.optimizer, mesh, config["seed"], shapes, options._replace(stored=stored)
            )
            for stored in ((False, True) if shared else (False,))
        ]
        self.used_programs = set()

    def run(self) -> None:
        """Trains to the end: updates, logs, evaluates and saves when due; then closes the files."""
        all_hosts_end = True
        try:
            step, reason = self._catch_up() or self._train()
            self.checkpoints.wait()
            self.metrics.finish(step, reason)
        except (Diverged, Stopped):  # on all hosts
            raise
        except BaseException:
            all_hosts_end = not jax.distributed.is_initialized()
            raise
        finally:
            try:
                self.metrics.close()
            finally:
                if all_hosts_end:  # or the other hosts would not answer
                    self.checkpoints.close()

    def _catch_up(self):
        """Makes up for the evaluation that was due when the run was stopped: a stop only saves the
        state. Returns the step and the reason if the run is over.
        """
        config, step = self.job.config, self.first_step
        late = step > 0 and self.clock.over()
        if step:
            due_now = any(validates(config, step, self._reason(step, late) is not None))
            if due_now and not self.checkpoints.evaluated(step):
                nll = self._validate(step)
                if nll is not None:
                    self.job.lock.check()
                    self.checkpoints.record_loss(step, nll)
            elif (nll := self.checkpoints.recorded_loss(step)) is not None:
                self._tell_optimizer(step, nll)
        self._stop_unchanged()
        reason = self._reason(step, late)
        return reason and (step, reason)

    def _stop_unchanged(self):
        """Stops, if requested, before this process makes an update: there is nothing to save."""
        if self.job.stop.requested:
            raise Stopped(
                f"stopped after update {self.first_step:,} of {self.job.config['steps']:,}: the"
                " same command resumes"
            )

    def _train(self):
        """Updates until the run is over; returns the last step and the reason."""
        job, config, steps = self.job, self.job.config, self.job.config["steps"]
        work = job.plan.flops_per_token, job.plan.devices
        unread, ahead = None, range(self.first_step + 1, steps + 1)
        self.interval, make = Interval(*work), functools.partial(_batch, job)
        programs, start = Programs(self._kind, self._lower), time.perf_counter()
        with programs, Prefetcher(make, ahead) as batches:
            count, program = programs.begin(ahead), programs.of(ahead[0])
            hosts.log0("compiling    the update" + (f", {count} programs" if count > 1 else ""))
            while not program.done():
                self._stop_unchanged()
                wait([program], timeout=0.1)
            self.interval.leave_out(time.perf_counter() - start)
            for step, (arrays, words) in batches:
                metrics = self._update(step, programs.of(step), arrays, batches.waited)
                # The update is under way; meanwhile the metrics of the one before are read.
                if unread is not None:
                    self._read(step - 1, unread)
                unread, stopped, last = (metrics, words), job.stop(step), step == steps
                log = any(validates(config, step, last)) or due(step, config["log_every"], last)
                late = self.clock.over(together=log or step % CLOCK_EVERY == 0)
                evaluate, save = validates(config, step, last or late)
                if log or evaluate or stopped:
                    self._read(step, unread)
                    unread = None
                    means, self.interval = self.interval.close(), Interval(*work)
                    self.metrics.write(step, "train", means)
                self.metrics.bar.show(step)
                if stopped:
                    self._stop(step)
                if not evaluate:
                    continue
                nll = self._validate(step)
                if nll is None:
                    self._stop(step)
                reason = self._reason(step, late)
                if save or reason or nll <= min(self.metrics.losses.values()):  # the best is kept
                    self._save(step, nll)
                if reason:
                    return step, reason
                self.interval = Interval(*work)  # neither scoring nor saving counts in its speed
        raise AssertionError("the last update ends the run")

    def _kind(self, step):
        """Key by which programs of updates differ: the use of stored encodings of words, and the
        shape of the batch.
        """
        config = self.job.config
        stored = not sparse.composes(config["seed"], step, config["compose_share"])
        return stored, self.job.batches.shape(config["seed"], step - 1)

    def _lower(self, step):
        stored, _ = self._kind(step)
        batch, _ = _batch(self.job, step)
        return self.updates[stored].lower(self.state, self.job.run.lexicon, batch)

    def _update(self, step, program, batch, waited):
        """Makes an update, without waiting for it, and returns its metrics.

        program: a future, see `Programs.of`. waited: seconds that the batch took.
        """
        if program in self.used_programs:
            self.interval.waited += waited
        else:
            start = time.perf_counter() - waited
            program.result()
            # A host that compiles for longer would keep the others waiting in the update itself,
            # which on CPUs fails after 30 seconds.
            hosts.barrier(f"the program of update {step}")
            self.used_programs.add(program)
            # This counts neither as waiting nor as work.
            self.interval.leave_out(time.perf_counter() - start)
        with jax.transfer_guard("disallow"):
            self.state, metrics = program.result()(self.state, self.job.run.lexicon, batch)
        return metrics

    def _read(self, step, metrics_and_words):
        """Reads an update's metrics from the device, checks them and adds them to the interval."""
        metrics, words = jax.device_get(metrics_and_words)
        self.monitor.check(step, metrics)
        self.interval.add(metrics, words)

    def _validate(self, step):
        """Scores the validation split, tells the optimizer and returns the loss in nats a word;
        None if a stop was requested meanwhile.
        """
        job, vocabulary = self.job, self.job.corpus.vocabulary
        # Each row of a stream starts without a carry, so their number must not depend on devices.
        streams = job.config["batches"]["layout"] == "streams"
        rows = job.plan.rows_per_update if streams else job.batches.per_microbatch
        windows = Windows.of(job.config, rows=rows)
        ids = job.corpus.ids["validation"]
        params = optim.params_to_evaluate(self.state.optimizer, self.state.params)

        def until_stopped(batches, count):
            return itertools.takewhile(lambda batch: not job.stop.requested, batches)

        run = job.run.with_parts(params=params, step=step)
        nll, _ = score_split(run, ids, windows, until_stopped)
        if job.stop.requested:
            return None
        result = Scores(ids, nll).summary(vocabulary)
        if not math.isfinite(result["nll"]):
            raise Diverged(step, f"validation loss {result['nll']}")
        keys = ["nll", "perplexity"]
        if result["tokens"] > result["words"] and result["characters"]:  # of sub-words
            keys += ["bits_per_character", "bits_per_byte"]
        losses = {key: result[key] for key in keys}
        # One that is due only because this process ends does not count for early stopping.
        extra = {} if any(validates(job.config, step, False)) else {"extra": 1}
        self.metrics.write(step, "validation", losses | extra)
        self._tell_optimizer(step, result["nll"])
        return result["nll"]

    def _tell_optimizer(self, step, nll):
        """Passes a loss to the optimizer if the evaluation is due by `evaluate_every`."""
        if due(step, self.job.config["evaluate_every"]):
            state = optim.after_evaluation(self.state.optimizer, nll)
            self.state = self.state._replace(optimizer=state)

    def _reason(self, step, late):
        ended = optim.ended(self.state.optimizer)
        losses, extra = self.metrics.losses, self.metrics.extra
        losses = [nll for evaluated, nll in losses.items() if evaluated not in extra]
        return reason(self.job.config, step, losses, late, ended)

    def _save(self, step, nll):
        self.job.lock.check()
        metadata = {ID: self.id, "hours": self.clock.hours()}
        self.checkpoints.save(step, self.state.items(), nll, **metadata)

    def _stop(self, step):
        self._save(step, None)
        self.checkpoints.wait()
        raise Stopped(
            f"stopped after update {step:,} of {self.job.config['steps']:,}, which is saved:"
            " the same command resumes"
        )


def _batch(job, step):
    """This host's share of an update, on its devices, and the number of words of the text that
    end in it.
    """
    share = jax.process_index(), jax.process_count()
    local = job.batches.batch(job.config["seed"], step - 1, share)
    words = int(np.sum(job.corpus.vocabulary.ends_word[local.targets] & (local.weights > 0)))
    return sharding.put_host_share(job.run.mesh, local), words
