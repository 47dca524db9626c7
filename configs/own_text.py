"""Your own text: the vocabulary, the model and the training are chosen for the text, for this machine and for the time you have.

    python train.py --config=configs/own_text.py --config.data.path=DIR --workdir=runs/mine --hours=1
    python evaluate.py --workdir=runs/mine --split=test

DIR holds train.txt, valid.txt and test.txt, or one text file, or is that file: of one file, the last tenth of the lines (at most
10,000 + 10,000) is split into validation and test text. The copies lie in data.cache; your folder stays as it is. White space
separates words, and a line ends a sentence or a paragraph.

Training prints what it chose and why; `--dry_run` prints it too. adaptive_jax/plans/choose.py has the rules. A setting of yours is
kept, and the others are chosen around it: `--config.body.layers=4`, `--config.data.threshold=3`, `--config.data.codes=8000`. The
choice is made once: the same command resumes the run with it.

Reproduces: nothing published. It is the model of Baevski & Auli 2019 (ADP-T: adaptive input, tied adaptive softmax), from 0.2M to
some 700M parameters.
"""

from ml_collections import ConfigDict, config_dict

from configs import base

WHOLE = (
    *("steps", "tokens_per_update", "tokens_per_device", "log_every", "evaluate_every", "checkpoint_every"),
    *("data.threshold", "data.limit", "data.codes", "batches.sequence_length"),
    *("body.layers", "body.features", "body.heads", "body.feed_forward", "schedule.warmup_steps", "schedule.cycle_steps"),
)
FRACTIONS = "body.dropout", "body.attention_dropout", "optimizer.learning_rate"
TYPES = dict.fromkeys(WHOLE, int) | dict.fromkeys(FRACTIONS, float) | {"dtype": str, "input.cutoffs": tuple}
LAYERS = base.layers(cutoffs=(), width=0, narrow=0)["adp_t"]


def get_config():
    """The config: what is None is chosen when training begins. `choose.hours` is the time that it may take."""
    chosen = {key: config_dict.placeholder(kind) for key, kind in TYPES.items()}
    config = base.config({"data.corpus": "text_files", "schedule.cycles": 1}, LAYERS, chosen)
    config.choose = ConfigDict({"hours": 1.0})
    return config
