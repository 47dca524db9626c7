"""Converts a language model that was trained with other code into a workdir for evaluate.py.

    python -m adaptive_jax convert CHECKPOINT WORDS OUT_WORKDIR
    python evaluate.py --workdir=OUT_WORKDIR --data_path=DIRECTORY --window=512 --context=480

CHECKPOINT is one of these; no code in it is run:
    a .pt file of fairseq's `transformer_lm` or `fconv_lm`, with `args` (until 2020) or `cfg`;
    the model.pt of AWD-LSTM (salesforce/awd-lstm-lm), or the state dict of its model.
WORDS says what the ids mean: for fairseq, the dict.txt that the model was trained with; for
AWD-LSTM, the directory of the train.txt, valid.txt and test.txt it was trained with, or a file with
one word a line in the order of the ids. OUT_WORKDIR is a new directory. DIRECTORY has a test.txt,
tokenised like the training text.

The command uses every tensor of the checkpoint exactly once, or writes nothing. train.py cannot
resume the workdir, because the checkpoint has no corpus; trained.json records how it was trained.
"""

POSITIONAL = ("CHECKPOINT", "WORDS", "OUT_WORKDIR")
STOPPED = "stopped: nothing was written; the same command converts the checkpoint anew"


def main(checkpoint: str, words: str, workdir: str) -> None:
    """Converts a checkpoint."""
    from adaptive_jax.interop.convert import convert  # after the flags: --help needs no jax

    convert(checkpoint, words, workdir)
