"""The paper's optimisation as one optax chain (Baevski & Auli 2019, section 4.5)."""

import optax

from adaptive_jax.errors import InputError


def schedule(
    *,
    learning_rate: float,
    min_learning_rate: float,
    warmup_from: float,
    warmup_steps: int,
    cycle_steps: int,
    cycles: int,
    shrink: float,
) -> optax.Schedule:
    """Linear warm-up, then cosine cycles, each twice as long as the one before (Loshchilov & Hutter 2016).

    Cycle c falls from `learning_rate · shrink^c` to `min_learning_rate · shrink^c` in `cycle_steps · 2^c` updates. The
    warm-up comes before the cycles: WikiText-103 trains 16K + 18K·(1+2+4+8) = 286K updates with shrink 0.75, Billion Word
    16K + 137K·(1+2+4) = 975K with shrink 0.6. After the last cycle the rate stays at its minimum.

    Returns:
        A function from the number of updates done to the rate of the next one.

    Raises:
        InputError: no cycle, or a cycle of no length.
    """
    if cycles < 1 or cycle_steps < 1:
        raise InputError(f"optimizer.cycles={cycles} of optimizer.cycle_steps={cycle_steps:,}: both must be 1 or more")
    return optax.sgdr_schedule(
        [
            dict(
                init_value=warmup_from if c == 0 else learning_rate * shrink**c,
                peak_value=learning_rate * shrink**c,
                warmup_steps=warmup_steps if c == 0 else 0,
                decay_steps=cycle_steps * 2**c + (warmup_steps if c == 0 else 0),
                end_value=min_learning_rate * shrink**c,
            )
            for c in range(cycles)
        ]
    )


def optimizer(rate: optax.Schedule, *, clip_norm: float, momentum: float) -> optax.GradientTransformation:
    """Gradients clipped to a global norm, then Nesterov's accelerated gradient at `rate`."""
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.trace(decay=momentum, nesterov=True),
        optax.scale_by_learning_rate(rate),
    )


def from_config(settings: dict) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The optimizer of a config's group `optimizer`, and its schedule: the fields of `optimizer` and of `schedule`."""
    rates = {key: value for key, value in settings.items() if key not in ("clip_norm", "momentum")}
    rate = schedule(**rates)
    return optimizer(rate, clip_norm=settings["clip_norm"], momentum=settings["momentum"]), rate
