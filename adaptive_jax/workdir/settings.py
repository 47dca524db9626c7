"""Settings of a run: config.json, plan.json, text.json, the vocabulary and the lexicon of its words
in its workdir.
"""

import json
import logging
import math
import os
import tempfile
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import numpy as np
from flax import traverse_util

from adaptive_jax.config.classes import ExternalClassError
from adaptive_jax.config.keys import General, at, check_allowed, keys_of, resolve
from adaptive_jax.data.corpora.corpus import Corpus
from adaptive_jax.data.vocabulary.clusters import cut, cutoffs_of, with_cutoffs
from adaptive_jax.data.vocabulary.lexicon import lexicon_of, read_entries, write_entries
from adaptive_jax.data.vocabulary.on_disk import read_with_checksums, write_with_checksums
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError, one_line
from adaptive_jax.files import absolute, in_bucket, names_in, path_of, replacing
from adaptive_jax.optimizers import optim
from adaptive_jax.parallel import hosts, sharding

# Settings that may change when a run is resumed: none of them changes an update that does not
# diverge. (evaluate_every: unless `optim.waits`.)
FREE = {
    "steps",
    "hours",
    "log_every",
    "evaluate_every",
    "checkpoint_every",
    "keep",
    "early_stopping",
    "divergence",
    "metrics.tensorboard",
    "metrics.wandb",
    "tokens_per_device",
    "fsdp",
    "shard_words",
    "body.remat",
    "data.path",
    "data.vocabulary_size",
    "input.lexicon",  # the run keeps its own copy
}

# Those in which the hosts of a run may differ
OF_A_HOST = {"data.path", "input.lexicon", "output.clusters"}

EXPORTED = "model.safetensors"  # the parameters of an exported model
PUBLISHED = "published.json"  # what a paper prints of the row that a run was trained as
# Beginnings of the names that a dry run leaves, or a run that ended before it wrote config.json
BEFORE_CONFIG = ".", "plan.", "vocabulary.", "subwords.", "lexicon.", "text."
ENDS = 1 << 16  # tokens at each end of a text that its checksum reads
# Seconds until all hosts see a file that one of them wrote: NFS may cache its absence for 60
VISIBLE = 100

logger = logging.getLogger(__name__)


def is_exported(workdir: Path) -> bool:
    """True if a workdir holds an exported model."""
    return (workdir / EXPORTED).exists()


def write_json(path: Path, content) -> None:
    """Writes `content` as readable JSON, atomically; see `to_json`."""
    with replacing(path) as file:
        file.write((to_json(content, indent=2) + "\n").encode())


def write_published(
    workdir: Path, config: Mapping, row: Mapping | None, changed: Iterable[str]
) -> None:
    """Records what a paper prints of the row of a run, and the keys in which the run differs from
    that row; nothing without a row.

    row: as `config.flags.published` returns it.
    changed: keys of the config; those that change no update are left out, but for how long the run
        trains.
    """
    if row is not None and hosts.first():
        free = _free(config) - {"steps", "hours", "early_stopping"}
        keys = [key for key in dict.fromkeys(changed) if key not in free]
        write_json(workdir / PUBLISHED, {**row, "changed": keys})


def to_json(content, **how) -> str:
    """Standard JSON, which has no infinity and no NaN: those become null."""
    return json.dumps(_finite(content), allow_nan=False, **how)


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
        _rename_keys(config)
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


def _rename_keys(config):
    """Gives a config of an earlier version the keys of this one, in place.

    The keys of a composed table's CNN stood among those of the table. The embedded corpus itself
    separated its words. `data.cache`, a directory of the machine, is left out: programs would be
    run from there.
    """
    table, data = at(config, "output.table"), at(config, "data")
    data.pop("cache", None)
    if (data.get("corpus"), data.get("tokeniser")) == ("embedded", "none"):
        data |= {"tokeniser": "marks", "lower": True}
    if table.get("name") == "composed" and "cnn" not in table:
        cnn = [key for key in keys_of("output.table.cnn") if key in table]
        table["cnn"] = {key: table.pop(key) for key in cnn}


def read_words(workdir: Path) -> Vocabulary:
    """The vocabulary of a run.

    Raises:
        InputError: it is missing or damaged.
    """
    return read_with_checksums(
        workdir / "vocabulary.txt", "restore the file of this run, or use another --workdir"
    )


def at_clusters(config: dict, workdir: Path) -> dict:
    """The config cut at its clusters, see `cut`; of a run that has begun and whose file of clusters
    is gone, as it began.

    Raises:
        InputError: as `cut`.
    """
    if (workdir / "config.json").exists() and not path_of(config["output"]["clusters"]).exists():
        begun = read_config(workdir)
        if begun["output"]["clusters"]:
            return with_cutoffs(config, cutoffs_of(begun), begun["data"]["vocabulary_size"])
    return cut(config)


def with_own_files(config: dict, workdir: Path, other_words: bool = False) -> dict:
    """The config of a run as `build` takes it: without its clusters, whose cutoffs are already in
    it, and, once the run has begun, with the lexicon that was copied into its workdir.

    config: see `at_clusters`, or as `read_config` returns it.
    other_words: words that the run does not know are asked for, and its copy of the lexicon lacks
        them: keep the path of the lexicon if there still is one.

    Raises:
        InputError: the copy is missing.
    """
    result = config | {"output": config["output"] | {"clusters": ""}}
    if not (workdir / "config.json").exists():
        return result
    if (lexicon := lexicon_of(config)) and not (other_words and path_of(lexicon).exists()):
        path = workdir / "lexicon.jsonl"
        if not path.exists():
            raise InputError(
                f"{path} is missing: restore the file of this run, or use another --workdir"
            )
        result["input"] = config["input"] | {"lexicon": str(path)}
    return result


def with_origin(config: dict, workdir: Path) -> dict:
    """The config with the run that a run in `workdir` started from, if it names none or the same
    one: resuming needs no --init_from.
    """
    if not (workdir / "config.json").exists():
        return config
    begun = read_config(workdir)
    if origin := config["init_from"]:
        same = begun["init_from"] or origin
        if absolute(path_of(origin)) != absolute(path_of(same)):
            return config
        config = config | {"init_from": same}
    keys = "init_from", "init_checkpoint", "init_words"
    return config | {key: begun[key] for key in keys if config[key] == getattr(General, key)}


def has_checkpoints(workdir: Path) -> bool:
    """True if a workdir holds checkpoints, damaged or not."""
    return any(name[0].isdigit() for name in names_in(workdir / "checkpoints"))


def check_name(workdir: Path) -> None:
    """Raises InputError if Orbax would write checkpoints of this workdir elsewhere, or not find
    them again.
    """
    name = str(absolute(workdir))
    # Bytes that Python could not decode.
    if any("\udc80" <= character <= "\udcff" for character in name):
        raise InputError(f"--workdir={name} is not UTF-8: use another name, or set LANG=C.UTF-8")
    for character in "\\[":
        if character in name:
            raise InputError(
                f"--workdir={name} has a {character} in it, which checkpoints cannot: use another"
                " name"
            )


def check_place(workdir: Path) -> None:
    """Finds before a long preparation that a run cannot begin or resume in `workdir`. Warns of
    files there that are no run's.

    Raises:
        InputError: see `check_name`; or it holds an exported model, or checkpoints without a
            config; or a bucket that cannot be written.
        OSError: the directory cannot be made or written.
    """
    check_name(workdir)
    if is_exported(workdir):
        raise InputError(
            f"{workdir} holds an exported model, which cannot be trained on: use another"
            f" --workdir, and --init_from={workdir} to start from its parameters"
        )
    if hosts.first():
        _check_writable(workdir)
    if (workdir / "config.json").exists():
        return
    if has_checkpoints(workdir):
        raise InputError(
            f"{workdir} has checkpoints and no config.json: restore it, or use another --workdir"
        )
    others = (name for name in names_in(workdir) if not name.startswith(BEFORE_CONFIG))
    if other := min(others, default=""):
        text = "--workdir=%s holds other files, such as %s: a run needs a directory of its own"
        logger.warning(text, workdir, other)


def _check_writable(workdir):
    if in_bucket(workdir):
        probe = workdir / ".writable"
        try:
            probe.write_bytes(b"")
            probe.unlink()
        except Exception as error:  # gcsfs raises many kinds
            raise InputError(
                f"cannot write {workdir} ({one_line(error)}): check its name and your credentials"
            ) from error
        return
    exists = next(
        place for place in (workdir.absolute(), *workdir.absolute().parents) if place.exists()
    )
    try:
        with tempfile.TemporaryFile(dir=exists):
            pass
    except OSError as error:
        error.filename = str(workdir)  # instead of the temporary file's
        raise


def shown(config: Mapping, key: str) -> object:
    """The value of a key as messages give it."""
    if key not in config:
        return "absent"
    return config[key] if config[key] != "" else "empty"


def check_same_run(workdir: Path, config: dict) -> None:
    """Refuses to resume a run with settings that would change its updates.

    Raises:
        InputError: names each setting that differs, with both values.
    """
    if not (workdir / "config.json").exists():
        return
    old, new = map(as_json, (read_config(workdir), config))
    if old.get("output.clusters") and new.get("output.clusters"):
        # Wherever the file is now: cutoffs and vocabulary say whether its clusters are the same.
        new["output.clusters"] = old["output.clusters"]
    free = _free(config)
    differ = [
        f"{key} was {shown(old, key)} and is now {shown(new, key)}"
        for key in sorted({*old, *new} - free)
        if old.get(key) != new.get(key)
    ]
    if differ:
        raise InputError(
            f"{workdir} holds a run of another config: {'; '.join(differ)}. Use another --workdir"
        )


def _free(config):
    """The settings that may change when this run is resumed."""
    return FREE - {"evaluate_every"} if optim.waits(config) else FREE


def text_of(corpus: Corpus) -> dict[str, dict]:
    """Identity of the text of each split: its number of tokens, and a checksum of those at its
    ends.
    """

    def about(ids):
        ends = np.concatenate([ids[:ENDS], ids[max(0, len(ids) - ENDS) :]])
        return {"tokens": len(ids), "crc32": zlib.crc32(ends.astype("<i4").tobytes())}

    return {split: about(ids) for split, ids in corpus.ids.items()}


def check_same_text(corpus: Corpus) -> None:
    """Refuses hosts that hold different texts, give the same words other ids, or have other numbers
    of devices.

    Raises:
        InputError: what differs.
    """
    devices = {"number of devices": jax.local_device_count()}
    texts = {f"{split} text": about for split, about in text_of(corpus).items()}
    for what, value in (devices | {"vocabulary": corpus.vocabulary.digest} | texts).items():
        if not _is_same_on_hosts(value):
            cure = "start equal hosts" if what in devices else "prepare the same text for all"
            raise InputError(f"the {what} must be the same on all hosts, got {value} here: {cure}")


def check_same_corpus(workdir: Path, corpus: Corpus) -> None:
    """Refuses to resume a run on another text, or one whose words have got other ids.

    Raises:
        InputError: what differs; or the vocabulary or text.json of the run is missing or damaged.
    """
    if not (workdir / "config.json").exists():
        return
    old, words = read_words(workdir), corpus.vocabulary
    if old.digest != words.digest:
        raise InputError(
            f"{workdir / 'vocabulary.txt'} has {len(old):,} words and the corpus now gives"
            f" {len(words):,}, not the same ones in the same order: restore the corpus, and the"
            " clusters if the run has some, or use another --workdir"
        )
    path, now = workdir / "text.json", text_of(corpus)
    if not path.exists():  # a run from before there was one
        return
    try:
        differ = [
            f"the {split} text had {was['tokens']:,} tokens and now has {now[split]['tokens']:,}"
            for split, was in json.loads(path.read_text()).items()
            if was != now.get(split, was)
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path} is damaged ({one_line(error)[:80]}): remove it to resume without its check"
        ) from error
    if differ:
        raise InputError(
            f"{workdir} holds a run on another text: {'; '.join(differ)}, not the same ones in the"
            " same order. Restore the corpus, or use another --workdir"
        )


def begin(workdir: Path, config: dict, plan: dict, corpus: Corpus) -> None:
    """Writes what the run is; the first host does, and the others wait until they see it.

    Raises:
        InputError: another run is there, the hosts do not share a disk, or their flags differ.
    """
    check_same_flags(config)
    check_same_run(workdir, config)
    check_same_corpus(workdir, corpus)
    hosts.barrier("before the workdir")  # all have checked for another run there
    if hosts.first():
        workdir.mkdir(parents=True, exist_ok=True)
    _check_shared(workdir)
    if hosts.first():
        write_with_checksums(corpus.vocabulary, workdir / "vocabulary.txt")
        if (lexicon := lexicon_of(config)) and not (workdir / "config.json").exists():
            write_entries(
                workdir / "lexicon.jsonl",
                read_entries(corpus.vocabulary, lexicon),
            )
        write_json(workdir / "text.json", text_of(corpus))
        write_json(workdir / "plan.json", plan)
        write_json(workdir / "config.json", config)
    hosts.barrier("the workdir")
    deadline = time.monotonic() + VISIBLE
    while not (workdir / "config.json").exists() and time.monotonic() < deadline:
        time.sleep(1)


def _check_shared(workdir):
    """Raises InputError on all hosts if one of them does not see what host 0 writes there.

    The file has a new name each time: NFS asks its server for a name that it has never looked up.
    """
    if not jax.distributed.is_initialized():
        return
    number = int.from_bytes(os.urandom(4)) if hosts.first() else 0
    probe = workdir / f".shared-{sharding.sum_over_hosts(number)}"
    if hosts.first():
        with replacing(probe):
            pass
    hosts.barrier("the probe of the workdir")
    missing = sharding.sum_over_hosts(not probe.exists())
    if hosts.first():
        probe.unlink()
    if missing:
        raise InputError(
            f"{workdir} is not the same on all hosts: use a --workdir on a disk that they share, or"
            " gs://BUCKET/NAME"
        )


def check_same_flags(config: Mapping) -> None:
    """Refuses hosts that differ in any of these: they would evaluate, save or end at different
    updates, and wait for each other for ever. Raises InputError.
    """
    flags = {key: value for key, value in sorted(flat(config).items()) if key not in OF_A_HOST}
    if _is_same_on_hosts(flags):
        return
    keys = [key for key, value in flags.items() if not _is_same_on_hosts(value)]
    settings = " ".join(f"{key}={flags[key]}" for key in keys)
    raise InputError(f"{settings} must be the same on all hosts: pass the same flags to all")


def _is_same_on_hosts(value):
    digest = zlib.crc32(to_json(value).encode())
    return sharding.sum_over_hosts(digest) == jax.process_count() * digest


def as_json(config: Mapping) -> dict:
    """`flat`, with values as config.json has them: lists for tuples."""
    return flat(json.loads(to_json(config)))


def flat(config: dict) -> dict:
    """`{"body": {"layers": 8}}` as `{"body.layers": 8}`."""
    return traverse_util.flatten_dict(config, sep=".")
