"""The validation loss during training."""

import itertools
import math

from adaptive_jax.data.batches.pipeline import Layout
from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.evaluation.scoring import plain, summary
from adaptive_jax.optimizers.optim import params_to_evaluate
from adaptive_jax.training.divergence import Diverged


def validation_nll(job, state, step, metrics) -> float | None:
    """Scores the validation split, records the result and returns the loss in nats a word; None if
    told to stop meanwhile.

    job: the loop's `Job`.

    Raises:
        Diverged: the loss is not finite.
    """
    ids, vocabulary = job.corpus.ids["validation"], job.corpus.vocabulary
    length, break_mode, layout = Layout(**job.config["batches"])
    params = params_to_evaluate(state.optimizer, state.params)
    # As many rows of a stream begin anew, so their number may not depend on the devices.
    rows = job.plan.rows_per_update if layout == "streams" else job.batches.per_microbatch
    settings = Windows(length, 0, break_mode, layout, rows)

    def until_stopped(batches, count):
        return itertools.takewhile(lambda batch: not job.stop.asked, batches)

    nll = plain(job.run._replace(params=params, step=step), ids, settings, until_stopped)
    if job.stop.asked:
        return None
    result = summary(nll, ids, vocabulary)
    if not math.isfinite(result["nll"]):
        raise Diverged(step, f"validation loss {result['nll']}", job.config["divergence"]["policy"])
    metrics.write(step, "validation", {key: result[key] for key in ("nll", "perplexity")})
    return result["nll"]
