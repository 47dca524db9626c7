"""Random search for the learning rate and the tokens of an update, within a time limit.

    pip install optuna
    python examples/tune.py --workdir=runs/tune --hours=1 --trial_hours=0.1 -- \
        --config=configs/quickstart.py

Every trial runs train.py for `trial_hours`, with the arguments after `--` and random values of the
two settings; the best trial has the lowest validation loss, in nats. The same command resumes the
search. Apostoae 2019, section 4, tunes these two settings in the same way.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import optuna


def main():
    """Draws, trains, and prints the best trial."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--workdir", type=Path, required=True)
    flags.add_argument("--hours", type=float, default=1, help="of all trials")
    flags.add_argument("--trial_hours", type=float, default=0.1, help="of one")
    flags.add_argument("--rates", type=float, nargs=2, default=(1e-4, 1), help="lowest, highest")
    flags.add_argument("--tokens", type=int, nargs="+", default=(1024, 2048, 4096, 8192))
    flags.add_argument("train", nargs="+", help="arguments of train.py, after --")
    arguments = flags.parse_args()

    def loss(trial: optuna.Trial) -> float:
        rate = trial.suggest_float("config.optimizer.learning_rate", *arguments.rates, log=True)
        tokens = trial.suggest_categorical("config.tokens_per_update", arguments.tokens)
        run = arguments.workdir / f"trial_{trial.number}"
        train = [*arguments.train, f"--workdir={run}", f"--hours={arguments.trial_hours}"]
        train += [
            f"--config.optimizer.learning_rate={rate}",
            f"--config.tokens_per_update={tokens}",
        ]
        if subprocess.run(
            [sys.executable, str(Path(__file__).parents[1] / "train.py"), *train]
        ).returncode:
            if trial.number >= 2 and not finished(trial.study):
                raise SystemExit(f"all {trial.number + 1} trials failed, the last one as above")
            raise optuna.TrialPruned  # it diverged, or ran out of memory
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return min(x["validation/nll"] for x in lines if x.get("validation/nll") is not None)

    arguments.workdir.mkdir(parents=True, exist_ok=True)
    storage = f"sqlite:///{arguments.workdir / 'trials.db'}"
    study = optuna.create_study(storage=storage, study_name="nll", load_if_exists=True)
    study.sampler = optuna.samplers.RandomSampler(seed=len(study.trials))  # other draws each time
    study.optimize(loss, timeout=3600 * arguments.hours)
    for trial in sorted(finished(study), key=lambda trial: trial.value):
        settings = " ".join(f"--{name}={value}" for name, value in trial.params.items())
        run = arguments.workdir / f"trial_{trial.number}"
        print(f"validation loss {trial.value:8.4f}  {run}  {settings}")


def finished(study: optuna.Study) -> list:
    """Trials that have a loss."""
    return [trial for trial in study.trials if trial.value is not None]


if __name__ == "__main__":
    main()
