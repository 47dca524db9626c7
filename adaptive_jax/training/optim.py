"""Optimizers and schedules, by name; any optimizer goes with any schedule."""

from collections.abc import Mapping

import optax

from adaptive_jax.errors import InputError
from adaptive_jax.registry import make
from adaptive_jax.training.optimizer import Optimizer
from adaptive_jax.training.schedules import SCHEDULES, Schedule


def nag(schedule: Schedule, *, momentum: float, clip_norm: float | None, decay: float = 0.0) -> Optimizer:
    """Nesterov's accelerated gradient of gradients clipped to a global norm (Baevski & Auli 2019, section 4.5).

    Args:
        learning_rate: the highest; the schedule says when.
        momentum: share of the last change that an update repeats.
        clip_norm: the largest norm of all gradients together; None does not clip.
        decay: decoupled weight decay, as in fairseq: an update shrinks every parameter by this share times the learning rate.

    Raises:
        InputError: a number out of range.
    """
    if not 0 <= momentum < 1:
        raise InputError(f"optimizer.momentum={momentum} must be from 0 to less than 1, such as 0.99")
    _check_clip_norm(clip_norm)
    _check_decay(decay=decay)
    clip = optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)
    return Optimizer(optax.chain(clip, optax.trace(decay=momentum, nesterov=True)), schedule, decay)


def _check_clip_norm(clip_norm):
    if clip_norm is not None and not clip_norm > 0:
        raise InputError(f"optimizer.clip_norm={clip_norm} must be above 0, such as 0.1; none does not clip")


def _check_decay(**decays):
    for name, decay in decays.items():
        if not 0 <= decay < 1:
            raise InputError(f"optimizer.{name}={decay} must be from 0 (none) to less than 1, such as 1.2e-6")


OPTIMIZERS = {"nag": nag}


def from_config(config: Mapping) -> Optimizer:
    """The optimizer that a config's groups `optimizer` and `schedule` describe; `optimizer.learning_rate` is the schedule's.

    Raises:
        InputError: a name or a key that does not exist or is missing, or a value out of range.
    """
    settings = dict(config["optimizer"])
    rate = {"learning_rate": settings.pop("learning_rate")} if "learning_rate" in settings else {}
    schedule = make("schedule", SCHEDULES, config["schedule"], **rate)
    return make("optimizer", OPTIMIZERS, settings, schedule=schedule)
