"""Optimizers and schedules, by name; any optimizer goes with any schedule."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from adaptive_jax.errors import InputError, check_at_least, check_known
from adaptive_jax.registry import make
from adaptive_jax.training.nt_asgd import FORMS, NtAsgd
from adaptive_jax.training.optimizer import Optimizer
from adaptive_jax.training.schedules import SCHEDULES, Schedule


def nag(
    schedule: Schedule, *, momentum: float, clip_norm: float | None, decoupled_decay: float = 0.0
) -> Optimizer:
    """Nesterov's accelerated gradient of gradients clipped to a global norm (Baevski & Auli 2019,
    section 4.5).

    Args:
        learning_rate: the highest; the schedule says when.
        momentum: share of the last change that an update repeats.
        clip_norm: the largest norm of all gradients together; None does not clip.
        decoupled_decay: an update shrinks every parameter by this share times the learning rate, as
            in fairseq.

    Raises:
        InputError: a number out of range.
    """
    if not 0 <= momentum < 1:
        raise InputError(
            f"optimizer.momentum={momentum} must be from 0 to less than 1, such as 0.99"
        )
    _check_clip_norm(clip_norm)
    _check_decay(decoupled_decay=decoupled_decay)
    clip = optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)
    return Optimizer(
        optax.chain(clip, optax.trace(decay=momentum, nesterov=True)), schedule, decoupled_decay
    )


def sgd(schedule: Schedule, *, clip_norm: float | None, l2_decay: float) -> Optimizer:
    """Gradient descent.

    Args:
        learning_rate: the highest; the schedule says when.
        clip_norm: the largest norm of all gradients together, as PyTorch clips: 1e-6 is added to
            the norm; None does not clip.
        l2_decay: share of every parameter that is added to its gradient after clipping, as PyTorch
            does.

    Raises:
        InputError: a number out of range.
    """
    return Optimizer(_clipped(clip_norm, l2_decay), schedule)


def adam(
    schedule: Schedule,
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    clip_norm: float | None,
    l2_decay: float,
    decoupled_decay: float,
) -> Optimizer:
    """Adam (Kingma & Ba 2015), with weight decay inside the gradient, as PyTorch's Adam has it, or
    apart from it, as AdamW.

    Args:
        learning_rate: the highest; the schedule says when.
        beta1: share of the mean gradient that an update keeps.
        beta2: share of the mean squared gradient that an update keeps.
        epsilon: added to the root of the mean squared gradient.
        clip_norm: the largest norm of all gradients together, as PyTorch clips: 1e-6 is added to
            the norm; None does not clip.
        l2_decay: share of every parameter that is added to its gradient after clipping, as
            PyTorch's Adam does.
        decoupled_decay: an update shrinks every parameter by this share times the learning rate
            (Loshchilov & Hutter 2019).

    Raises:
        InputError: a number out of range.
    """
    for name, beta in ("beta1", beta1), ("beta2", beta2):
        if not 0 <= beta < 1:
            raise InputError(f"optimizer.{name}={beta} must be from 0 to less than 1, such as 0.9")
    if not 0 < epsilon < 1:
        raise InputError(
            f"optimizer.epsilon={epsilon} must be above 0 and less than 1, such as 1e-8"
        )
    _check_decay(decoupled_decay=decoupled_decay)
    direction = optax.chain(
        _clipped(clip_norm, l2_decay), optax.scale_by_adam(beta1, beta2, epsilon)
    )
    return Optimizer(direction, schedule, decoupled_decay)


def nt_asgd(
    schedule: Schedule, *, nonmono: int, form: str, clip_norm: float | None, l2_decay: float
) -> Optimizer:
    """NT-ASGD: gradient descent that takes averages once the validation loss stops falling (Merity
    et al. 2018, algorithm 1).

    The switch comes after an evaluation whose loss is higher than the lowest of those more than
    `nonmono` evaluations ago. From then on the averages are evaluated and published, while training
    goes on from the current parameters. Which evaluations count depends on `evaluate_every`, not on
    `checkpoint_every`.

    The form "paper" averages the parameters at the switch and after every update since. The public
    code, here "torch", switches to PyTorch's ASGD, which differs: the first parameters that it
    averages are those after the second update since the switch, and each update takes the learning
    rate of the one before, so the scaling by a window's length comes one update late. The code also
    goes back to the first learning rate at the switch; here the schedule simply goes on.

    Args:
        learning_rate: the highest; the schedule says when.
        nonmono: evaluations that a loss may be above an older one before averages are taken; 0:
            averages from the first update on, as the public code finetunes.
        form: "paper", or "torch" for the trajectories of the public code: a rate that lags, and
            averages from the second update.
        clip_norm: the largest norm of all gradients together, as PyTorch clips: 1e-6 is added to
            the norm; None does not clip.
        l2_decay: share of every parameter that is added to its gradient after clipping, as PyTorch
            does.

    Raises:
        InputError: a number out of range, or an unknown form.
    """
    check_at_least(0, **{"optimizer.nonmono": nonmono})
    check_known(f"optimizer.form={form!r}", form, FORMS)
    return NtAsgd(_clipped(clip_norm, l2_decay), schedule, nonmono, form)


def _clipped(clip_norm, l2_decay):
    """Clipping as PyTorch does it, then L2 decay."""
    _check_clip_norm(clip_norm)
    _check_decay(l2_decay=l2_decay)

    def clip(gradients, params):
        factor = jnp.minimum(1, clip_norm / (optax.global_norm(gradients) + 1e-6))
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)

    clipping = optax.identity() if clip_norm is None else optax.stateless(clip)
    return optax.chain(
        clipping, optax.add_decayed_weights(l2_decay) if l2_decay else optax.identity()
    )


def _check_clip_norm(clip_norm):
    if clip_norm is not None and not clip_norm > 0:
        raise InputError(
            f"optimizer.clip_norm={clip_norm} must be above 0, such as 0.1; none does not clip"
        )


def _check_decay(**decays):
    for name, decay in decays.items():
        if not 0 <= decay < 1:
            raise InputError(
                f"optimizer.{name}={decay} must be from 0 (none) to less than 1, such as 1.2e-6"
            )


OPTIMIZERS = {"nag": nag, "sgd": sgd, "adam": adam, "nt_asgd": nt_asgd}


def from_config(config: Mapping) -> Optimizer:
    """The optimizer that a config's groups `optimizer` and `schedule` describe;
    `optimizer.learning_rate` is the schedule's.

    Raises:
        InputError: a name or a key that does not exist or is missing, or a value out of range.
    """
    settings = dict(config["optimizer"])
    rate = {"learning_rate": settings.pop("learning_rate")} if "learning_rate" in settings else {}
    schedule = make("schedule", SCHEDULES, config["schedule"], **rate)
    return make("optimizer", OPTIMIZERS, settings, schedule=schedule)
