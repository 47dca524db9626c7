"""Optimizers by name, as one transformation of optax: those below, and any of optax.

    optimizer = from_config(config)
    state = optimizer.init(params)
    changes, state = optimizer.update(gradients, state, params, scale=0.5)
    state = after_evaluation(state, nll)

An optimizer is a function from a learning rate and settings to a `GradientTransformation`; the
schedule calls it with the rate of each update. A part of the state that depends on validation
losses has a method `after_evaluation(nll)`; one that can end a run has a method `ended()`. A field
`average` holds averages that are evaluated in place of the parameters.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import tree_utils

from adaptive_jax.config.classes import find, make
from adaptive_jax.config.options import (
    Field,
    Option,
    PositiveFloat,
    PositiveInt,
    Share,
    fields_of,
)
from adaptive_jax.errors import InputError, one_line
from adaptive_jax.optimizers.nt_asgd import FORMS, descend_and_average
from adaptive_jax.optimizers.row_wise import row_wise_adagrad, row_wise_adam
from adaptive_jax.optimizers.schedules import SCHEDULES, scheduled

Rate = PositiveFloat
Norm = Annotated[float | None, Option(within="(0, inf]")]


def nag(
    learning_rate: Rate = 1.0,
    *,
    momentum: Share = 0.99,
    clip_norm: Norm = 0.1,
    decoupled_decay: Share = 0.0,
) -> optax.GradientTransformation:
    """Nesterov's accelerated gradient of gradients clipped to a global norm (Baevski & Auli 2019,
    section 4.5).

    Args:
        learning_rate: the highest; the schedule says when.
        momentum: share of the last change that an update repeats.
        clip_norm: the largest norm of all gradients together; None does not clip.
        decoupled_decay: an update shrinks every parameter by this share times the learning rate, as
            in fairseq.
    """
    clipped = _clipped(clip_norm, clip=optax.clip_by_global_norm)
    trace = optax.trace(decay=momentum, nesterov=True)
    return optax.chain(*clipped, trace, *_descent(learning_rate, decoupled_decay))


def sgd(
    learning_rate: Rate = 1.0, *, clip_norm: Norm = 0.25, l2_decay: Share = 0.0
) -> optax.GradientTransformation:
    """Gradient descent.

    Args:
        learning_rate: the highest; the schedule says when.
        clip_norm: the largest norm of all gradients together, as PyTorch clips: 1e-6 is added to
            the norm; None does not clip.
        l2_decay: share of every parameter that is added to its gradient after clipping, as PyTorch
            does.
    """
    return optax.chain(*_clipped(clip_norm, l2_decay), *_descent(learning_rate))


def adam(
    learning_rate: Rate = 1e-3,
    *,
    epsilon: Annotated[float, Option(within="(0, 1)")] = 1e-8,
    b1: Share = 0.9,
    b2: Share = 0.999,
    clip_norm: Norm = 0.25,
    l2_decay: Share = 0.0,
    decoupled_decay: Share = 0.0,
) -> optax.GradientTransformation:
    """Adam (Kingma & Ba 2015), with weight decay inside the gradient, as PyTorch's Adam has it, or
    apart from it, as AdamW.

    Clipping and L2 decay are as those of `sgd`.

    Args:
        learning_rate: the highest; the schedule says when.
        epsilon: added to the root of the mean squared gradient.
        b1, b2: decay rates of the means of gradients and of their squares.
        decoupled_decay: an update shrinks every parameter by this share times the learning rate
            (Loshchilov & Hutter 2019).
    """
    scale = optax.scale_by_adam(b1, b2, epsilon)
    return optax.chain(
        *_clipped(clip_norm, l2_decay), scale, *_descent(learning_rate, decoupled_decay)
    )


def nt_asgd(
    learning_rate: Rate = 30.0,
    *,
    nonmono: PositiveInt = 5,
    form: Annotated[str, Option(among=FORMS)] = "paper",
    clip_norm: Norm = 0.25,
    l2_decay: Share = 1.2e-6,
) -> optax.GradientTransformation:
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
    Clipping and L2 decay are as those of `sgd`.

    Args:
        learning_rate: the highest; the schedule says when.
        nonmono: averages begin after an evaluation whose loss is above the lowest of all but the
            last `nonmono` before it; 1 or more.
        form: "paper", or "torch" for the trajectories of the public code: a rate that lags, and
            averages from the second update.
    """
    clipped = _clipped(clip_norm, l2_decay)
    return optax.chain(*clipped, descend_and_average(learning_rate, nonmono, form))


def asgd(
    learning_rate: Rate = 30.0,
    *,
    form: Annotated[str, Option(among=FORMS)] = "paper",
    clip_norm: Norm = 0.25,
    l2_decay: Share = 1.2e-6,
) -> optax.GradientTransformation:
    """Averaged gradient descent (Polyak & Juditsky 1992): `nt_asgd` whose averages begin with the
    first update, as the public code of AWD-LSTM finetunes.

    Clipping and L2 decay are as those of `sgd`.

    Args:
        learning_rate: the highest; the schedule says when.
        form: "paper" or "torch", see `nt_asgd`.
    """
    return nt_asgd(learning_rate, nonmono=0, form=form, clip_norm=clip_norm, l2_decay=l2_decay)


TABLES = {"row_wise_adagrad": row_wise_adagrad, "row_wise_adam": row_wise_adam}


class OfTables(NamedTuple):
    """Keys of every optimizer.

    Attributes:
        tables: the optimizer of tables, the parameters with a row for each word or n-gram, with one
            number of state a row, see adaptive_jax/optimizers/row_wise.py; empty: as the others.
            Clipping and L2 decay, as in `sgd`, then apply to all parameters first; decoupled_decay
            applies to tables as well; all other settings apply to the other parameters.
        tables_scale: times the learning rate of the others, that of tables with such an optimizer.
    """

    tables: Annotated[str, Option(among=("", *TABLES))] = ""
    tables_scale: Rate = 1.0


OPTIMIZERS = {"nag": nag, "sgd": sgd, "adam": adam, "nt_asgd": nt_asgd, "asgd": asgd}
# Not offered: parts of optimizers, and `schedule_free*`, whose state has no field of averages
NOT_OFFERED = "_", "scale_by", "schedule_free"


def optimizer_named(name: str) -> Callable[..., optax.GradientTransformation]:
    """The function that `optimizer.name` means: one of `OPTIMIZERS`, `package.module:function`, or
    else one of optax or optax.contrib.

    Raises:
        InputError: no such function, or no optimizer.
    """
    return find("optimizer", optimizers_of_optax() | OPTIMIZERS, name)


def optimizers_of_optax() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Functions of optax and optax.contrib with an argument `learning_rate`, by name."""
    members = [*inspect.getmembers(optax), *inspect.getmembers(optax.contrib)]
    return {
        name: function
        for name, function in members
        if inspect.isfunction(function)
        and not name.startswith(NOT_OFFERED)
        and "learning_rate" in inspect.signature(function).parameters
    }


def is_of_optax(name: str) -> bool:
    """True if `optimizer.name` means an optimizer of optax."""
    return name not in OPTIMIZERS and ":" not in name


def arguments(name: str) -> Mapping[str, Field]:
    """The arguments that a config may set of the optimizer `optimizer.name`.

    Those of optax are numbers or text, a `learning_rate` without a default has 1e-3; beside them
    stand `clip_norm` and `l2_decay` as `sgd` has them, by default without effect. All have those of
    `OfTables`.

    Raises:
        InputError: as `optimizer_named`.
    """
    fields, common = fields_of(optimizer_named(name)), fields_of(sgd)
    if not is_of_optax(name):
        return fields | fields_of(OfTables)
    rate = fields["learning_rate"].default
    changed = {
        "learning_rate": common["learning_rate"]._replace(
            default=rate if isinstance(rate, float) else 1e-3
        ),
        "clip_norm": common["clip_norm"]._replace(default=None),
        "l2_decay": common["l2_decay"],
    }
    fields = fields | changed
    plain = {key: field for key, field in fields.items() if _is_plain(field)}
    return plain | fields_of(OfTables)


def from_config(
    config: Mapping, tables: Collection[tuple[str, ...]] = ()
) -> optax.GradientTransformationExtraArgs:
    """The optimizer that a config's groups `optimizer` and `schedule` describe;
    `optimizer.learning_rate` is the schedule's.

    tables: paths of the parameters that `optimizer.tables` is for.

    Raises:
        InputError: a name or a key that does not exist or is missing, a value out of range, or an
            optimizer whose `update` needs more than gradients, state and parameters.
    """
    settings = dict(config["optimizer"])
    name = settings["name"]
    of_tables = OfTables(settings.pop("tables"), settings.pop("tables_scale"))
    classes, before, clipping = {name: optimizer_named(name)}, (), {}
    if is_of_optax(name) or of_tables.tables:
        clipping = {"clip_norm": None, "l2_decay": 0.0}
        before = _clipped(*(settings.pop(key, off) for key, off in clipping.items()))
    if "learning_rate" not in settings:
        raise InputError(f"optimizer.name={name!r} must take a learning_rate, for the schedule")
    rate = settings.pop("learning_rate")
    schedule = make("schedule", SCHEDULES, config["schedule"], learning_rate=rate)

    def optimizer_of(rate):
        chosen = make("optimizer", classes, settings, learning_rate=rate, **clipping)
        if of_tables.tables:
            rate, decay = rate * of_tables.tables_scale, settings.get("decoupled_decay", 0.0)
            decayed = [optax.add_decayed_weights(-rate * decay)] if decay else []
            by_row = optax.chain(TABLES[of_tables.tables](rate), *decayed)
            chosen = optax.partition({"tables": by_row, "others": chosen}, groups)
        return optax.chain(*before, chosen) if clipping else chosen

    def groups(params):
        def group_of(path, _):
            keys = tuple(getattr(key, "key", None) for key in path)
            return "tables" if keys in tables else "others"

        return jax.tree.map_with_path(group_of, params)

    optimizer = scheduled(optimizer_of, schedule)
    params = {"a": jnp.zeros((2, 2))}
    try:
        jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), params)
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"optimizer.name={name!r} cannot train: {one_line(error)}") from error
    if name not in OPTIMIZERS:
        states = [jax.tree.leaves(optimizer_of(rate).init(params)) for rate in (0.1, 0.2)]
        if not all(map(_is_equal, *states)):
            raise InputError(f"optimizer.name={name!r} must not read its rate before an update")
    return optimizer


def _is_equal(a, b):
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = map(jax.random.key_data, (a, b))
    return np.array_equal(a, b)


def after_evaluation(state: Any, nll: float) -> Any:
    """The next state, given the validation loss in nats a word, of the parts that depend on it.

    Training calls it once for each evaluation that is due by `evaluate_every`. It computes where
    the state lies, which several hosts may share.
    """

    def update(part):
        if not _waits(part):
            return part
        shardings = jax.tree.map(lambda a: a.sharding, part)
        return jax.jit(type(part).after_evaluation, out_shardings=shardings)(part, nll)

    return jax.tree.map(update, state, is_leaf=_waits)


def params_to_evaluate(state: Any, params: Any) -> Any:
    """The parameters to score and to publish: the averages, if the optimizer takes them."""
    return tree_utils.tree_get(state, "average", params, is_field)


def learning_rate(state: Any) -> jax.Array:
    """The learning rate of the last update, times its scale."""
    return tree_utils.tree_get(state, "learning_rate", filtering=is_field)


def is_field(path: tuple, value: Any) -> bool:
    """A filter of `optax.tree_utils.tree_get` and `tree_set`: true of the fields of a state, and
    not of a parameter that has the name of one.
    """
    return not isinstance(path[-1], jax.tree_util.DictKey)


def ended(state: Any) -> bool:
    """True if training should end after this evaluation."""
    return any(bool(part.ended()) for part in _waiting(state) if hasattr(part, "ended"))


def waits(config: Mapping) -> str | None:
    """The group of the config whose choice makes updates depend on validation losses, if any."""
    state = jax.eval_shape(from_config(config).init, {"a": jnp.zeros((2, 2))})
    parts = {"optimizer": state.inner, "schedule": state.schedule}
    return next((group for group, part in parts.items() if _waiting(part)), None)


def _waits(part):
    return hasattr(part, "after_evaluation")


def _waiting(state):
    return [part for part in jax.tree.leaves(state, is_leaf=_waits) if _waits(part)]


def _descent(learning_rate, decay=0.0):
    """Decoupled weight decay, then a step against the direction."""
    decayed = [optax.add_decayed_weights(decay)] if decay else []
    return *decayed, optax.scale_by_learning_rate(learning_rate)


def _clip_as_torch(clip_norm):
    def clip(gradients, params):
        factor = jnp.minimum(1, clip_norm / (optax.tree.norm(gradients) + 1e-6))
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)

    return optax.stateless(clip)


def _clipped(clip_norm, l2_decay=0.0, clip=_clip_as_torch):
    """Clipping, then L2 decay."""
    clipping = [] if clip_norm is None else [clip(clip_norm)]
    return *clipping, *([optax.add_decayed_weights(l2_decay)] if l2_decay else [])


def _is_plain(field):
    """True for a number or text, or a number that may be None."""
    if field.default is None:
        return field.kind in (float, int)
    return isinstance(field.default, bool | int | float | str)
