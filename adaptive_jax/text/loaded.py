"""A trained model as an object: what README calls `adaptive_jax.load("runs/quickstart")`."""

import os
from collections.abc import Iterable

import numpy as np

from adaptive_jax.evaluation.runs import Run, open_run
from adaptive_jax.stores import path_of
from adaptive_jax.text.lines import Lines
from adaptive_jax.workdir.settings import read_config


class LoadedModel:
    """A trained model with its words, ready for text.

    Attributes:
        run: the model, its parameters on the devices, its vocabulary, its config and its step.
        lines: how text becomes tokens of this model.
    """

    def __init__(self, run: Run):
        self.run = run
        self.lines = Lines.of(run.config["data"], run.vocabulary)

    def encode(self, text: str) -> np.ndarray:
        """Tokens of text, int32 `[tokens]`: words split as in the run's corpus, and an `<eos>` for each line feed.

        Raises:
            InputError: no text, or a word that the run does not know, where it has no `<unk>`.
        """
        return self.lines.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens, with a line feed for each `<eos>`; detokenised where the corpus says how."""
        return self.lines.decode(ids)

    def __repr__(self) -> str:
        config = self.run.config
        layers = " → ".join(config[group]["name"] for group in ("input", "body", "output"))
        return f"<LoadedModel {layers}, {len(self.run.vocabulary):,} words, step {self.run.step:,}>"


def load(workdir: str | os.PathLike, checkpoint: str | int = "best") -> LoadedModel:
    """Opens a run of train.py, or a converted model, for text.

    Args:
        workdir: the run's directory, or its URL of gs:// or s3://.
        checkpoint: "best" by validation, "latest", or a step.

    Raises:
        InputError: no run or checkpoint there.
    """
    place = path_of(workdir)
    read_config(place)  # first: it says best what a directory without a run lacks
    return LoadedModel(open_run(place, str(checkpoint)))
