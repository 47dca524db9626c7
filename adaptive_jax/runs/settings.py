"""Settings of a run in its workdir: config.json, the vocabulary and the lexicon of its words."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from flax import traverse_util

from adaptive_jax.config.classes import ExternalClassError
from adaptive_jax.config.keys import General, check_allowed, resolve, with_words
from adaptive_jax.data.vocabulary.clusters import cutoffs_of, with_clusters, with_cutoffs
from adaptive_jax.data.vocabulary.lexicon import lexicon_of
from adaptive_jax.data.vocabulary.ngrams import counted_settings
from adaptive_jax.data.vocabulary.on_disk import read_with_checksums
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.files import absolute, in_bucket, path_of, write_bytes

EXPORTED = "model.safetensors"  # the parameters of an exported model
NGRAMS = "ngrams.npz"  # counts of n-grams of the train split
PUBLISHED = "published.json"  # what a paper prints of the row that a run was trained as


def is_exported(workdir: Path) -> bool:
    """True if a workdir holds an exported model."""
    return (workdir / EXPORTED).exists()


def write_json(path: Path, content) -> None:
    """Writes `content` as readable JSON, atomically; see `to_json`."""
    write_bytes(path, (to_json(content, indent=2) + "\n").encode())


def to_json(content, **options) -> str:
    """Standard JSON, in which infinity and NaN become null. options: of json.dumps."""
    return json.dumps(_finite(content), allow_nan=False, **options)


def _finite(content):
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def read_config(workdir: Path) -> dict:
    """The config that a run was started with.

    Raises:
        InputError: `workdir` holds no run, a damaged config, or one of an earlier version.
        ExternalClassError: it names code that is not allowed, see `check_allowed`, or not found.
    """
    path = workdir / "config.json"
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("it holds no config")
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"{workdir} holds no run (no config.json): use the --workdir of a run that train.py"
            " made"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} cannot be read ({error}): restore it, or start in a new workdir"
        ) from None
    try:
        check_allowed(config, path)
        resolved = resolve(config)
        if missing := flat(resolved).keys() - flat(config).keys():
            raise InputError(f"config.{min(missing)} is missing")
        return resolved
    except ExternalClassError:
        raise
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} was written by an earlier version of adaptive_jax, or changed ({error}): train"
            " again, or use that version"
        ) from None


def begun_config(workdir: Path) -> dict | None:
    """The config of the run that has begun in a workdir; None if none has. Raises InputError as
    `read_config`.
    """
    return read_config(workdir) if (workdir / "config.json").exists() else None


def read_words(workdir: Path) -> Vocabulary:
    """The vocabulary of a run.

    Raises:
        InputError: it is missing or damaged.
    """
    return read_with_checksums(
        workdir / "vocabulary.txt", "restore the file of this run, or use another --workdir"
    )


def at_clusters(config: dict, begun: dict | None) -> dict:
    """The config cut at its clusters, see `with_clusters`; of a run that has begun and whose file
    of clusters is gone, as it began.

    begun: see `begun_config`.

    Raises:
        InputError: as `with_clusters`.
    """
    if begun and begun["output"]["clusters"] and not path_of(config["output"]["clusters"]).exists():
        return with_cutoffs(config, cutoffs_of(begun), begun["data"]["vocabulary_size"])
    return with_clusters(config)


def with_own_files(config: dict, workdir: Path | None, other_words: bool = False) -> dict:
    """The config of a run as `build` takes it: without clusters, whose cutoffs are already in it;
    with the counts of n-grams of its workdir and, once the run has begun, the lexicon there.

    config: see `at_clusters`, or as `read_config` returns it.
    other_words: keep the path of the lexicon if that file still exists on a disk, for words that
        the copy in the workdir lacks. A path in a bucket is never read: the config is not trusted.

    Raises:
        InputError: the copy is missing.
    """
    result = config | {"output": config["output"] | {"clusters": ""}}
    if workdir is not None and counted_settings(config):
        result["input"] = config["input"] | {"counts": str(workdir / NGRAMS)}
    if workdir is None or not (workdir / "config.json").exists():
        return result
    lexicon = lexicon_of(config)
    local = other_words and not in_bucket(lexicon) and path_of(lexicon).exists()
    if lexicon and not local:
        path = workdir / "lexicon.jsonl"
        if not path.exists():
            raise InputError(
                f"{path} is missing: restore the file of this run, or use another --workdir"
            )
        return with_words(result, lexicon=str(path))
    return result


def with_origin(config: dict, begun: dict | None) -> dict:
    """The config with the origin of the run that has begun, if it names none or the same one:
    resuming needs no --init_from.
    """
    if not begun:
        return config
    origin, begun_origin = config["init_from"], begun["init_from"] or config["init_from"]
    if origin and absolute(path_of(origin)) != absolute(path_of(begun_origin)):
        return config
    keys = "init_checkpoint", "init_words"
    settings = {key: begun[key] for key in keys if config[key] == getattr(General, key)}
    return config | {"init_from": begun_origin} | settings


def as_json(config: Mapping) -> dict:
    """`flat`, with values as config.json has them: lists for tuples."""
    return flat(json.loads(to_json(config)))


def flat(config: dict) -> dict:
    """`{"body": {"layers": 8}}` as `{"body.layers": 8}`."""
    return traverse_util.flatten_dict(config, sep=".")
