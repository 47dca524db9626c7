"""Evaluates a trained model: loss in nats and perplexity per word over a split.

    python evaluate.py --workdir=runs/quickstart --split=test
    python evaluate.py --workdir=runs/adp_t --split=test --window=3072 --context=2560 --break_mode=complete

Writes workdir/eval/*.json. Several hosts run it as they run train.py.
"""

from absl import flags

from adaptive_jax import command

SPLIT = flags.DEFINE_enum("split", "test", ["train", "validation", "test"], "Split to score.")
WINDOW = flags.DEFINE_integer("window", 0, "Tokens the model reads at once; 0: the sequence length it was trained with.")
CONTEXT = flags.DEFINE_integer("context", 0, "Tokens of each window that are given and not scored.")
CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best (by validation), latest, or a step.")
DATA_PATH = flags.DEFINE_string("data_path", None, "Local copy of the corpus; default: the one the run was trained on.")
BREAK_MODE = flags.DEFINE_string("break_mode", None, "none, complete, complete_doc or eos; default: that of the run.")
ROWS = flags.DEFINE_integer("rows", 0, "Rows of a batch. Of layout streams 0 means 1, which scores exactly; N rows are faster.")
command.define_workdir("Directory of a run that train.py made.")
flags.adopt_module_key_flags(command)  # --help shows them


def main():
    from adaptive_jax.devices import hosts  # after the flags: --help and their errors should not wait for jax
    from adaptive_jax.evaluation.evaluate import Request, evaluate

    what = SPLIT.value, WINDOW.value, CONTEXT.value, CHECKPOINT.value
    request = Request(*what, DATA_PATH.value, BREAK_MODE.value, rows=ROWS.value)
    workdir, others = command.workdir()
    hosts.initialize(*others)
    with hosts.together():
        evaluate(workdir, request)


if __name__ == "__main__":
    command.run(main, stopped="stopped: nothing was written; the same command evaluates anew")
