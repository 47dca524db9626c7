"""Reads a language model that fairseq trained, into a workdir that evaluate.py scores.

    python -m adaptive_jax.fairseq CHECKPOINT DICT OUT_WORKDIR
    python evaluate.py --workdir=OUT_WORKDIR --data_path=DIRECTORY --window=512 --context=480

CHECKPOINT is a .pt file of a `transformer_lm`, with `args` (until 2020) or `cfg`; nothing in it is run. DICT is the dict.txt
it was trained with. OUT_WORKDIR is a directory to be made. DIRECTORY holds test.txt, tokenised like the training text.

Every tensor of the checkpoint is used exactly once, or nothing is written. The workdir is there to be scored: train.py does
not go on with it, since a corpus gives no words `<s>` and `<pad>`. Its config keeps the training settings for the record.
"""

import io
import math
import os
import shlex
import shutil
import types
import uuid
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from adaptive_jax import command
from adaptive_jax.data.vocabulary.words import EOS, Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.fairseq import torch_files
from adaptive_jax.fairseq.config import config_of
from adaptive_jax.fairseq.tensors import parameters_of, words_of
from adaptive_jax.training import optim
from adaptive_jax.training.state import State
from adaptive_jax.workdir.checkpoints import Checkpoints, write_json


class Loaded(NamedTuple):
    """A checkpoint: options by name, the model's state by name, updates done, validation loss in nats (or infinity)."""

    options: dict
    state: dict[str, np.ndarray]
    updates: int
    nll: float


def read(path: Path) -> Loaded:
    """What a checkpoint of fairseq holds; the groups of a `cfg` are laid flat, as `args` are.

    Raises:
        InputError: no checkpoint of fairseq's, or one that is damaged.
    """
    content = torch_files.read(path)
    parts = content if isinstance(content, dict) else {}
    if parts.get("cfg"):
        groups = {name: _fields(group) for name, group in _fields(parts["cfg"]).items()}
        options = {key: value for group in groups.values() for key, value in group.items()} | groups.get("model", {})
        options |= {name: group["_name"] for name, group in groups.items() if "_name" in group}
        options.setdefault("arch", options.get("model"))
    else:
        options = _fields(parts.get("args"))
    state = parts.get("model")
    if not options or not isinstance(state, dict) or not all(isinstance(a, np.ndarray) for a in state.values()):
        raise InputError(
            f"{path} has no model with its args or cfg: give a checkpoint that fairseq saved while training"
        )
    history, extra = (parts.get("optimizer_history") or [{}])[-1], parts.get("extra_state") or {}
    loss = extra.get("val_loss") if options.get("best_checkpoint_metric", "loss") == "loss" else None
    nll = math.inf if loss is None else float(loss) * math.log(2)  # fairseq reports bits
    return Loaded(options, dict(state), int(history.get("num_updates", 0)), nll)


def _fields(group):
    return vars(group) if isinstance(group, types.SimpleNamespace) else group if isinstance(group, dict) else {}


def read_dictionary(path: Path) -> Vocabulary:
    """The vocabulary of a dict.txt: fairseq's four words `<s> <pad> </s> <unk>`, then the file's, so that ids stay.

    `</s>` is called `<eos>` here. The file has no counts for the four: they get the largest in it, so that the unigram
    perplexity of a converted model is only a rough number. A word that a later line overwrites (`#fairseq:overwrite`)
    keeps its id under a name that no text can contain.

    Raises:
        InputError: with the number of the line.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; give the model's dict.txt") from None
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}, line {number}: not UTF-8; give the dict.txt that came with the checkpoint") from None
    words, counts = ["<s>", "<pad>", "</s>", "<unk>"], []
    ids = {word: i for i, word in enumerate(words)}
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        line, at = line.rstrip(), f"{path}, line {number}: {line.rstrip()!r}"
        entry = line.removesuffix(" #fairseq:overwrite")
        word, _, count = entry.rpartition(" ")
        if not word or not (count.isascii() and count.isdigit() and len(count) < 19):
            raise InputError(f"{at} must be a word, one space and its count; give the dict.txt of the checkpoint")
        if word == EOS:
            raise InputError(
                f"{at}: the end of a sentence, fairseq's </s>, has this name here; rename the word, in the text too"
            )
        if word in ids and entry == line:
            raise InputError(f"{at} stands twice; give the dict.txt of the checkpoint")
        if counts and int(count) > counts[-1]:
            raise InputError(
                f"{at} follows a count of {counts[-1]}; fairseq sorts by count, so give counts that do not rise "
                "(they only enter the unigram perplexity) and leave the order of the words"
            )
        if word in ids:
            words[ids[word]] = f"{word} (until line {number})"
        ids[word] = len(words)
        words.append(word)
        counts.append(int(count))
    if not counts:
        raise InputError(f"{path} has no words; give the dict.txt of the checkpoint")
    words[2] = EOS
    return Vocabulary(tuple(words), np.array([counts[0]] * 4 + counts, np.int64))


def convert(checkpoint: str, dictionary: str, workdir: str) -> None:
    """Writes a checkpoint of fairseq as a workdir: config.json, vocabulary.txt and one checkpoint without momentum.

    Raises:
        InputError: anything wrong with one of the files, a workdir that holds something; nothing is written then.
    """
    workdir = Path(workdir).absolute()
    if workdir.exists() and (not workdir.is_dir() or any(workdir.iterdir())):
        raise InputError(f"{workdir} is there already: give a directory to be made")
    vocabulary = read_dictionary(Path(dictionary))
    try:
        loaded = read(Path(checkpoint))
        config = config_of(loaded.options, loaded.state, len(vocabulary))
        words = words_of(loaded.state)
        if words not in (0, len(vocabulary)):
            raise InputError(
                f"{dictionary} has {len(vocabulary):,} words, fairseq's own four included, and the checkpoint {words:,}: "
                "give the dict.txt that it was trained with"
            )
        params = jax.tree.map(jnp.asarray, parameters_of(loaded.state, config))
    except InputError:
        raise
    except Exception as error:  # options and tensors of any type and shape fail in many ways for one reason
        reason = " ".join(f"{type(error).__name__} {error}".split())[:150]
        raise InputError(f"{checkpoint} is damaged or no model that can be converted ({reason})") from error
    optimizer = optim.from_config(config["optimizer"])[0].init(params)
    step = jnp.asarray(loaded.updates, jnp.int32)
    # The schedule goes on from the checkpoint's update.
    state = State(step, params, optax.tree_utils.tree_set(optimizer, count=step))

    workdir.parent.mkdir(parents=True, exist_ok=True)
    unfinished = workdir.with_name(f".{workdir.name}.{uuid.uuid4().hex}")
    try:
        unfinished.mkdir()
        write_json(unfinished / "config.json", config)
        vocabulary.write(unfinished / "vocabulary.txt")
        checkpoints = Checkpoints(unfinished)
        checkpoints.save(loaded.updates, state, loaded.nll)
        checkpoints.close()
        os.replace(unfinished, workdir)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(
        f"{workdir}: {size:,} parameters, {len(vocabulary):,} words, after {loaded.updates:,} updates\n"
        f"python evaluate.py --workdir={shlex.quote(str(workdir))} --data_path=DIRECTORY    # that holds test.txt",
        flush=True,
    )


if __name__ == "__main__":
    command.run(convert, positional=("CHECKPOINT", "DICT", "OUT_WORKDIR"))
