"""What is wrong with a config, found before anything is read, compiled or written."""

import math
from collections.abc import Mapping

from adaptive_jax.data.corpora.load import checked_settings
from adaptive_jax.defaults import check_keys
from adaptive_jax.errors import InputError, check_at_least, check_known
from adaptive_jax.training import optim

POLICIES = ("stop", "skip", "rewind")
FROM_ZERO = ("fsdp", "log_every", "evaluate_every", "checkpoint_every", "early_stopping")
SEEDS = 2**32
LARGEST = 2**31 - 1  # of any other number: JAX counts in 32 bits


def check_settings(config: Mapping) -> None:
    """Checks keys, types, and the values that belong to no layer, optimizer, schedule or division
    of an update.

    Raises:
        InputError: names the key and its value.
    """
    _check_sizes("", check_keys(config))
    checked_settings(config["data"])
    check_at_least(
        0,
        **{key: config[key] for key in FROM_ZERO},
        **{"data.vocabulary_size": config["data"]["vocabulary_size"]},
    )
    if not 0 <= config["keep_every_hours"] < math.inf:
        raise InputError(
            f"keep_every_hours={config['keep_every_hours']} must be 0 (keep none) or more, and"
            " finite"
        )
    if not 0 <= config["hours"] < math.inf:
        raise InputError(
            f"hours={config['hours']} must be 0 (no limit) or more, and finite: --hours=1.5 is an"
            " hour and a half"
        )
    if not 0 <= config["seed"] < SEEDS:
        raise InputError(f"seed={config['seed']} must be from 0 to {SEEDS - 1:,}")
    check_known(
        f"gradient_sums={config['gradient_sums']!r}",
        config["gradient_sums"],
        ("float32", "bfloat16"),
    )
    check_known(f"init_words={config['init_words']!r}", config["init_words"], ("new", "both"))
    divergence = config["divergence"]
    check_known(f"divergence.policy={divergence['policy']!r}", divergence["policy"], POLICIES)
    check_at_least(0, **{"divergence.rewinds": divergence["rewinds"]})
    for key in ("loss", "spike"):
        if divergence[key] <= 0:
            raise InputError(
                f"divergence.{key}={divergence[key]} must be above 0 nats a token; inf: never"
            )
    schedule, steps = config["schedule"], config["steps"]
    if config["evaluate_every"] == 0 and (group := optim.waits(config)):
        raise InputError(
            f"evaluate_every=0 with {group}.name={config[group]['name']!r}, which waits for"
            " evaluations: give evaluate_every=500"
        )
    if "warmup_steps" in schedule and (warmup := schedule["warmup_steps"]) > steps > 0:
        raise InputError(
            f"schedule.warmup_steps={warmup:,} is longer than the run of steps={steps:,}: take "
            f"schedule.warmup_steps={steps // 10:,}, or more steps"
        )


def _check_sizes(path, value):
    """Raises InputError for a finite number that is too large to count or compute in, other
    than the seed.
    """
    if isinstance(value, Mapping):
        for key in value:
            _check_sizes(f"{path}.{key}".lstrip("."), value[key])
    elif isinstance(value, tuple):
        for item in value:
            _check_sizes(path, item)
    elif isinstance(value, int | float) and LARGEST < value < math.inf and path != "seed":
        raise InputError(f"{path}={value} is too large: give at most {LARGEST:,}")
