"""Converts a language model trained with fairseq into a workdir for evaluate.py.

    python -m adaptive_jax.convert CHECKPOINT DICT OUT_WORKDIR
    python evaluate.py --workdir=OUT_WORKDIR --data_path=DIRECTORY --window=512 --context=480

CHECKPOINT is a .pt file of a `transformer_lm`, with `args` (until 2020) or `cfg`; no code in it is run. DICT is the dict.txt
that the model was trained with. OUT_WORKDIR is a new directory. DIRECTORY has a test.txt, tokenised like the training text.

The command uses every tensor of the checkpoint exactly once, or writes nothing. train.py cannot resume the workdir, because
no corpus gives the words `<s>` and `<pad>`; the config keeps the training settings as a record.
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

from adaptive_jax import command
from adaptive_jax.convert import torch_files
from adaptive_jax.convert.transformer import parameters_of, vocabulary_size_of
from adaptive_jax.convert.transformer_config import config_of
from adaptive_jax.data.corpora.load import home_of
from adaptive_jax.data.vocabulary.sealed import write_sealed
from adaptive_jax.data.vocabulary.words import EOS, Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.workdir.checkpoints import Checkpoints
from adaptive_jax.workdir.settings import check_name, write_json


class Loaded(NamedTuple):
    """The content of a checkpoint.

    Attributes:
        options: settings of training by name.
        state: tensors of the model by name.
        updates: number of updates done.
        nll: validation loss in nats a word, None if the checkpoint has none.
    """

    options: dict
    state: dict[str, np.ndarray]
    updates: int
    nll: float | None


def read(path: Path) -> Loaded:
    """Reads a checkpoint of fairseq. The groups of a `cfg` are merged into one dict, like `args`.

    Raises:
        InputError: the file is damaged or not a checkpoint of fairseq.
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
        raise InputError(f"{path} has no model with its args or cfg: give a checkpoint that fairseq saved during training")
    history, extra = (parts.get("optimizer_history") or [{}])[-1], parts.get("extra_state") or {}
    loss = extra.get("val_loss") if options.get("best_checkpoint_metric", "loss") == "loss" else None
    nll = math.inf if loss is None else float(loss) * math.log(2)  # fairseq reports bits
    return Loaded(options, dict(state), int(history.get("num_updates", 0)), nll if math.isfinite(nll) else None)


def _fields(group):
    return vars(group) if isinstance(group, types.SimpleNamespace) else group if isinstance(group, dict) else {}


def read_dictionary(path: Path) -> Vocabulary:
    """The vocabulary of a dict.txt with the same ids: fairseq's own `<s> <pad> </s> <unk>`, then the words of the file.

    `</s>` is called `<eos>` here. The file has no counts for fairseq's four words; they get the largest count in it, so the
    unigram perplexity of a converted model is only a rough number. A word that a later line overwrites
    (`#fairseq:overwrite`) keeps its id under a name that cannot occur in a text.

    Raises:
        InputError: gives the number of the wrong line.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; give the model's dict.txt") from None
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}, line {number}: not UTF-8; give the dict.txt of the checkpoint") from None
    words, counts = ["<s>", "<pad>", "</s>", "<unk>"], []
    ids = {word: i for i, word in enumerate(words)}
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        line = line.rstrip()
        entry = line.removesuffix(" #fairseq:overwrite")
        word, _, count = entry.rpartition(" ")
        try:
            if not word or not (count.isascii() and count.isdigit() and len(count) < 19):
                raise InputError("must be a word, one space and its count; give the dict.txt of the checkpoint")
            if word == EOS:
                raise InputError("has the name of fairseq's </s> in this project; rename the word, also in the text")
            if word in ids and entry == line:
                raise InputError("repeats a word; give the dict.txt of the checkpoint")
            if counts and int(count) > counts[-1]:
                raise InputError(
                    f"follows a count of {counts[-1]}, and fairseq sorts by count; keep the order of the words and lower "
                    "this count (counts are used for the unigram perplexity only)"
                )
        except InputError as error:
            raise InputError(f"{path}, line {number}: {line!r} {error}") from None
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
    """Writes a checkpoint of fairseq as a workdir: config.json, vocabulary.txt and one checkpoint with the parameters.

    Raises:
        InputError: one of the files is wrong, or the workdir is not empty; nothing is written then.
    """
    workdir = home_of(str(workdir), "OUT_WORKDIR").absolute()
    check_name(workdir)
    if workdir.exists() and (not workdir.is_dir() or any(workdir.iterdir())):
        raise InputError(f"{workdir} already exists: give a new directory")
    vocabulary = read_dictionary(Path(dictionary))
    try:
        loaded = read(Path(checkpoint))
        config = config_of(loaded.options, loaded.state, len(vocabulary))
        size = vocabulary_size_of(loaded.state)
        if size not in (0, len(vocabulary)):
            raise InputError(
                f"{dictionary} has {len(vocabulary):,} words, including fairseq's own four, and the checkpoint {size:,}: "
                "give the dict.txt that the model was trained with"
            )
        params = jax.tree.map(jnp.asarray, parameters_of(loaded.state, config))
    except InputError:
        raise
    except Exception as error:  # options and tensors can have any type and shape, which fails in many ways
        reason = " ".join(f"{type(error).__name__} {error}".split())[:150]
        raise InputError(f"cannot convert {checkpoint} ({reason}): it is damaged or of another kind; give another") from error

    workdir.parent.mkdir(parents=True, exist_ok=True)
    unfinished = workdir.with_name(f".{workdir.name}.{uuid.uuid4().hex}")
    try:
        unfinished.mkdir()
        write_json(unfinished / "config.json", config)
        write_sealed(vocabulary, unfinished / "vocabulary.txt")
        checkpoints = Checkpoints(unfinished)
        checkpoints.save(loaded.updates, {"params": params}, loaded.nll)
        checkpoints.close()
        os.replace(unfinished, workdir)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(
        f"{workdir}: {sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters, {len(vocabulary):,} words, "
        f"after {loaded.updates:,} updates\n"
        f"python evaluate.py --workdir={shlex.quote(str(workdir))} --data_path=DIRECTORY    # that holds test.txt",
        flush=True,
    )


if __name__ == "__main__":
    stopped = "stopped: nothing was written; the same command converts the checkpoint anew"
    command.run(convert, positional=("CHECKPOINT", "DICT", "OUT_WORKDIR"), stopped=stopped)
