"""Times of training: what an update of a row takes, and how good rows get in equal time.

    python -m benchmarks.train_time CORPUS [--rows=adp_t,sm_t,cnn] [--size=full|cpu] [--batch=64]
        [--dtype=bfloat16] [--repeats=5] [--count] [--hours=H --data=DIR]
        [--workdir=runs/train_time]

Updates are timed on random words, at the size of configs/CORPUS.py or, with --size=cpu, with 4
blocks of width 256 and 4,096 tokens an update, --batch rows at a time. Small ones compute in
float32, unless --dtype says otherwise. Rows take turns, and nothing else should run. --count times
nothing and counts the work, without that of composing words.

With --hours the rows are then trained, each for as many updates as fit into these hours by its time
of one, so that a machine that is busy later changes nothing, and scored on the test split. The same
command resumes, with the times that it kept in the workdir. At the end it draws losses by hours:
benchmarks/train_time_CORPUS_SIZE.png, with --dtype that too, and its numbers beside it as JSON.
"""

import json
from pathlib import Path

from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.config.keys import complete
from adaptive_jax.data.vocabulary import ngrams
from adaptive_jax.errors import check_at_least, check_known
from adaptive_jax.files import path_of
from adaptive_jax.runs.settings import write_json
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.scores.scores import perplexity
from adaptive_jax.training.loop import train
from benchmarks import figures
from benchmarks.lines import CORPORA
from benchmarks.throughput import flops, numbered, our_update, zipf
from benchmarks.timing import machine, timed
from configs import wikitext2

EVALUATIONS = 6  # of a row that is trained
COUNTED = 1_000_000  # random words of which n-grams are counted
SMALL = {  # what two cores train in hours
    "dtype": "float32",
    "log_every": 20,
    "tokens_per_update": 4_096,
    "tokens_per_device": 4_096,
    "batches.sequence_length": 128,
    "body.layers": 4,
    "body.features": 256,
    "body.heads": 4,
    "body.feed_forward": 1_024,
    "body.dropout": 0.1,
    "body.attention_dropout": 0.0,
    "body.activation_dropout": 0.0,
    "optimizer.learning_rate": 0.5,
    "schedule.warmup_steps": 500,
}


def config_of(corpus: str, name: str, size: str, dtype: str = "") -> dict:
    """The config of a row, with another dtype if one is named. Scaled down, words of one width and
    filters are a quarter as wide, too, and the tails have no dropout.
    """
    file = CORPORA[corpus]
    row, small = file.ROWS[name], {}
    settings = {**file.LAYERS[row.layers], **row.changes}
    if size == "cpu":
        small |= SMALL
        small |= {
            key: settings[key] // 4
            for key in ("input.width", "output.table.width")
            if key in settings
        }
        if "output.tail_dropout" in settings:
            small["output.tail_dropout"] = 0.0
        if settings["input.name"] == "char_cnn":
            small |= {f"input.{key}": value for key, value in wikitext2.CHARACTERS.items()}
    if dtype:
        small["dtype"] = dtype
    return complete(file.SETTINGS, settings, small)


def update_of(config: dict, batch: int, workdir: Path):
    """A function that makes an update on random words; n-grams are those of a random text."""
    words = config["data"]["vocabulary_size"]
    if orders := ngrams.counted_settings(config).get("orders"):
        ids, path = zipf(config, COUNTED), workdir / "random_ngrams.npz"
        limits = config["input"]["rows"], config["input"]["least"]
        counts = {order: ngrams.count(ids, words, order, *limits) for order in orders}
        ngrams.write(path, numbered(words), counts)
        config = config | {"input": config["input"] | {"counts": str(path)}}
    rows = config["tokens_per_update"] // config["batches"]["sequence_length"]
    batch = max(size for size in range(1, min(batch, rows) + 1) if rows % size == 0)
    return our_update(config, batch, microbatches=rows // batch)[0]


def times_of(settings, corpus: str, workdir: Path) -> dict[str, dict]:
    """Numbers of the rows by name: those in the workdir, or new ones, which it then keeps."""
    path, peers = workdir / "times.json", {}
    kept = json.loads(path.read_text()) if path.exists() else {}
    for name in settings.rows:
        config = config_of(corpus, name, settings.size, settings.dtype)
        tokens, length = config["tokens_per_update"], config["batches"]["sequence_length"]
        kept.setdefault(name, {"flops": flops(config, tokens // length), "tokens": tokens})
        if "seconds" not in kept[name] and not settings.count:
            peers[name] = update_of(config, settings.batch, workdir)
    for row in timed(peers, settings.repeats) if peers else ():
        kept[row["peer"]] |= {"seconds": row["seconds"], "machine": machine()}
    write_json(path, kept)
    return {name: kept[name] for name in settings.rows}


def table_of(times: dict[str, dict], corpus: str) -> str:
    """A line for each row; ratios are to the first one, published ones of hours."""
    lines = ["| row | TFLOP an update | ratio | s an update | words/s | ratio | published ratio |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    first, *_ = times
    hours = {name: CORPORA[corpus].ROWS[name].paper.hours for name in times}
    for name, row in times.items():
        cells = [f"`{name}`", f"{row['flops'] / 1e12:,.2f}"]
        cells.append(f"{row['flops'] / times[first]['flops']:.2f}")
        if seconds := row.get("seconds"):
            cells += [f"{seconds:.3f}", f"{row['tokens'] / seconds:,.0f}"]
            base = times[first].get("seconds")
            cells.append(f"{seconds / base:.2f}" if base else "")
        else:
            cells += [""] * 3
        both = hours[name] and hours[first]
        cells.append(f"{hours[name] / hours[first]:.2f}" if both else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def trained(config: dict, hours: float, seconds: float, data: str, workdir: Path) -> dict:
    """Trains a row for these hours, or resumes it, and scores it. Returns its test perplexity and
    its losses on the validation split by hours.
    """
    steps = max(2, int(3600 * hours / seconds))
    warmup = min(config["schedule"]["warmup_steps"], steps // 10)
    often = dict.fromkeys(("evaluate_every", "checkpoint_every"), max(1, steps // EVALUATIONS))
    config = config | {"steps": steps} | often
    if "cycles" in config["schedule"]:
        cycle = {"warmup_steps": warmup, "cycle_steps": steps - warmup, "cycles": 1}
        config["schedule"] = config["schedule"] | cycle
    train(config | {"data": config["data"] | {"path": data}}, workdir)
    logged = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    losses = [
        (line["step"] * seconds / 3600, line["validation/nll"])
        for line in logged
        if "validation/nll" in line
    ]
    return {"value": evaluate(workdir, Request("test"))["perplexity"], "losses": losses}


def main(corpus: str, settings) -> None:
    """Times the rows, prints the table, and with --hours trains them and draws the figure."""
    check_known(f"CORPUS={corpus}", corpus, CORPORA)
    for name in settings.rows:
        check_known(f"--rows={name}", name, CORPORA[corpus].ROWS)
    check_at_least(1, **{"--batch": settings.batch, "--repeats": settings.repeats})
    experiment = "_".join(filter(None, (corpus, settings.size, settings.dtype)))
    workdir = path_of(settings.workdir) / experiment
    workdir.mkdir(parents=True, exist_ok=True)
    times = times_of(settings, corpus, workdir)
    print(f"{machine()}; random words\n\n{table_of(times, corpus)}")
    if settings.count or not settings.hours:
        return
    rows = []
    for name, row in times.items():
        config = config_of(corpus, name, settings.size, settings.dtype)
        numbers = trained(config, settings.hours, row["seconds"], settings.data, workdir / name)
        rows.append({"corpus": corpus, "row": name, "paper": None} | numbers)
        best = perplexity(min(loss for _, loss in numbers["losses"]))
        print(f"{name}: validation {best:.1f}, test {numbers['value']:.1f}", flush=True)
    path = Path(settings.figures) / f"train_time_{experiment}.json"
    title = f"{corpus}, {settings.hours:g} hours each, {settings.size} size"
    shown = {"kind": "table", "title": title, "measure": "test perplexity", "by": "hours"}
    figures.write(path, shown | {"rows": rows})


if __name__ == "__main__":
    flags.DEFINE_list(
        "rows", ["adp_t", "sm_t", "cnn"], "Rows of the config file; ratios are to the first."
    )
    flags.DEFINE_enum("size", "full", ["full", "cpu"], "Size of the models.")
    flags.DEFINE_string("dtype", "", "Dtype of the computations; empty: that of the size.")
    flags.DEFINE_integer("batch", 64, "Most rows of a microbatch; they divide those of an update.")
    flags.DEFINE_integer("repeats", 5, "Timed updates of each row.")
    flags.DEFINE_bool("count", False, "Only count the work.")
    flags.DEFINE_float("hours", 0.0, "Hours of training of each row; 0: none.")
    flags.DEFINE_string("data", "", "Directory of the corpus; empty: download.")
    flags.DEFINE_string("workdir", "runs/train_time", "Directory for times and runs.")
    flags.DEFINE_string("figures", str(figures.HERE), "Directory for the figure and its numbers.")
    commands.run(lambda corpus: main(corpus, flags.FLAGS), positional=["CORPUS"])
