"""A paper's table with our numbers beside the published ones: trains its rows one after the other,
writes a table and a figure.

    python -m benchmarks.tables TABLE [--size=cpu|full] [--corpora=NAME=DIR,...] [--glove=FILE]
        [--lexicon=DIR]

`cpu` takes at most two hours on 2 cores, GroC's table 2 some four, and has the paper's
corpus where that is small, else WikiText-2; `full` is the paper's own setting. Every row trains in
a process of its own. The same command resumes, and keeps the rows that are finished. Once all are,
it writes its section of benchmarks/RESULTS.md and a figure.

Rows with `pretrained` in their names cluster words by the vectors of the run of `awd_sm`, those
with `glove` by vectors from --glove; without that file they are left out.
"""

import importlib.util
import json
import platform
import resource
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path

import jax
from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.errors import InputError, check_known
from adaptive_jax.files import replacing
from adaptive_jax.parallel import processors
from adaptive_jax.runs.checkpoints import Checkpoints
from adaptive_jax.runs.settings import write_json
from adaptive_jax.scores.evaluate import evaluate
from adaptive_jax.scores.scores import perplexity
from adaptive_jax.training.divergence import Diverged
from adaptive_jax.training.loop import train
from benchmarks import figures
from benchmarks.groc_tables import FAR, NEAR, TARGETS
from benchmarks.lines import CORPORA, TUNED_EPOCHS, WORDS, Line, Table, config_of, epochs
from benchmarks.paper_tables import TABLES

RESULTS = Path(__file__).with_name("RESULTS.md")
COLUMNS = "row | valid | test | parameters | s an epoch | minutes | peak MB | "
COLUMNS += "paper: valid | test | parameters | s an epoch | hours | MB"
TITLE = f"| {COLUMNS} |\n|---{'|---:' * COLUMNS.count('|')}|"
PASSED = "size", "workdir", "glove", "lexicon"  # flags that the process of a row gets, too


def runs_of(name: str, settings) -> Path:
    """Where the runs of a table at a size are."""
    return Path(settings.workdir) / f"{name}_{settings.size}"


def measure(name: str, line: Line, settings) -> dict:
    """Trains a line's model, or resumes its run, and scores it. Returns its numbers; of one that
    diverges, where it does.

    Peak memory is that of the accelerator, or on a CPU of this process, the libraries among it.
    """
    table, runs, texts = TABLES[name](), runs_of(name, settings), directories(settings.corpora)
    config, workdir = config_of(table, line, settings.size), runs / line.run
    config["data"]["path"] = texts.get(line.target if line.tuned else line.corpus, "")
    if line.tuned:
        config["init_from"] = str(runs / line.trained)
    if line.clusters:
        config["output"]["clusters"] = str(clusters_of(line, config, workdir, settings.glove))
    if settings.lexicon and "lexicon" in config["input"]:
        config["input"]["lexicon"] = settings.lexicon
    try:
        train(config, workdir)
    except Diverged as error:
        return {"diverged": str(error).partition(":")[0]}
    earlier = earlier_numbers(workdir)
    tests = earlier.get("test", {})
    for each in table.lines[settings.size]:
        if each.run == line.run and each.scored not in tests:
            directory = None if each.target == line.corpus else texts.get(each.target)
            tests[each.scored] = evaluate(workdir, each.request(directory))["perplexity"]
    checkpoints = Checkpoints(workdir, read_only=True)
    logged = [json.loads(text) for text in (workdir / "metrics.jsonl").read_text().splitlines()]
    speeds = [each["train/words_per_second"] for each in logged if "train/words_per_second" in each]
    losses = {
        split: [(each["step"], each[f"{key}/nll"]) for each in logged if f"{key}/nll" in each]
        for split, key in (("training", "train"), ("validation", "validation"))
    }
    device = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    peak = device or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = json.loads((workdir / "plan.json").read_text())
    return {
        "test": tests,
        "losses": losses,
        "epoch": (line.tuned or WORDS[line.corpus]) / statistics.median_high(speeds),
        "hours": checkpoints.hours(checkpoints.latest()),
        "parameters": plan["parameters"]["total"],
        "operations": plan["flops_per_token"] * plan["tokens_per_update"],
        "peak_bytes": max(peak, earlier.get("peak_bytes", 0)),  # this process may only evaluate
    }


def earlier_numbers(workdir: Path) -> dict:
    """The result of `measure` for this run before; {} if it never finished. A table may have got
    new lines since, to score.
    """
    result = workdir / "row.json"
    return json.loads(result.read_text()) if result.exists() else {}


def directories(corpora: list[str]) -> dict[str, str]:
    """`--corpora` by name. Raises InputError: no NAME=DIR, or an unknown name."""
    by_name = dict(each.partition("=")[::2] for each in corpora)
    for name, directory in by_name.items():
        check_known(f"--corpora={name}", name, [*CORPORA, *TARGETS, NEAR, FAR])
        if not directory:
            raise InputError(f"--corpora={name} names no directory: pass --corpora={name}=DIR")
    return by_name


def clusters_of(line: Line, config: dict, workdir: Path, glove: str) -> Path:
    """The file of a line's clusters, made once; the autoencoder's are as large as those of the
    row without it.
    """
    method, vectors = line.clusters
    path = workdir.with_name(f"{workdir.name}.clusters.txt")
    trained = workdir.with_name(f"{line.corpus}-awd_sm")
    if path.exists():
        return path
    if not (trained / "config.json").exists():
        raise InputError(
            f"{line.row} needs the vocabulary of awd_sm: pass --only={trained.name} first, or no"
            " --only"
        )
    given = {
        "vocabulary": trained,
        "method": method,
        "embeddings": glove if vectors == "glove" else trained,
        "clusters": 3,
        "output": path,
    }
    if method == "autoencoder":
        cutoffs = config["output"]["table"]["cutoffs"] or config["input"].get("cutoffs", ())
        given["cutoffs"] = ",".join(map(str, cutoffs))
    make = [f"--{key}={value}" for key, value in given.items()]
    run("adaptive_jax", "clusters", *make)
    return path


def run(*arguments: str) -> None:
    """Runs a module of this Python. Raises InputError if it fails."""
    if status := subprocess.run([sys.executable, "-m", *arguments]).returncode:
        raise InputError(
            f"python -m {' '.join(arguments)} ended with status {status}: fix what it reports; the"
            " same command resumes"
        )


def numbers_of(name: str, line: Line, settings) -> dict:
    """A line's numbers: those that its run keeps as `row.json`, or those of a process that trains
    and scores it. Raises InputError if that fails.
    """
    workdir = runs_of(name, settings) / line.run
    earlier = earlier_numbers(workdir)
    if "diverged" not in earlier and line.scored not in earlier.get("test", {}):
        print(f"{line.run}:", flush=True)
        same = [f"--{key}={value}" for key in PASSED if (value := getattr(settings, key))]
        same += [f"--corpora={','.join(settings.corpora)}"] if settings.corpora else []
        run("benchmarks.tables", name, f"--only={line.run}", *same)
    return json.loads((workdir / "row.json").read_text())


def cells(line: Line, numbers: dict) -> str:
    """A line of the table: ours, then the published numbers, nothing where there are none."""
    if "diverged" in numbers:
        nothing = " |" * (COLUMNS.count("|") - 1)
        return f"| `{line.row}` | diverges: {numbers['diverged']} |{nothing}"
    valid = min((nll for _, nll in numbers["losses"]["validation"]), default=None)
    shown = f"`{line.row}`" + (f", {line.context} tokens of context" if line.context else "")
    shown += f", {'finetuned on ' if line.tuned else ''}{line.target}" if line.target else ""
    shown += f", {line.cache} cache" if line.cache else ""
    shown += f", {line.share:.0%} of the lexicon in inference" if line.share is not None else ""
    ours = [
        shown,
        "" if valid is None or line.scored != "0" else f"{perplexity(valid):.1f}",
        f"{numbers['test'][line.scored]:.1f}",
        f"{numbers['parameters'] / 1e6:.1f}M",
        f"{numbers['epoch']:,.0f}",
        f"{60 * numbers['hours']:.1f}",
        f"{numbers['peak_bytes'] / 1e6:,.0f}",
    ]
    millions = None if line.paper.parameters is None else f"{line.paper.parameters}M"
    paper = line.paper.valid, line.paper.test, millions, line.epoch, line.paper.hours, line.memory
    return f"| {' | '.join([*ours, *('' if each is None else str(each) for each in paper)])} |"


def heading(title: str, command: str) -> list[str]:
    """The first lines of a section: what ran and where."""
    device = jax.devices()[0]
    cores = processors.cores()
    on_cpu = f"{cores} CPU core{'s' * (cores > 1)}"
    where = on_cpu if device.platform == "cpu" else device.device_kind
    versions = f"python {platform.python_version()}, jax {jax.__version__}"
    about = f"{date.today()}, {where}, {platform.system()}; {versions}.\n"
    return [f"## {title}\n", about, f"    python -m benchmarks.tables {command}"]


def section(name: str, size: str, measured: list[tuple[Line, dict]]) -> str:
    """The section of RESULTS.md, with a table for each corpus."""
    table = TABLES[name]()
    lines = heading(f"{table.title}, {size} size", f"{name} --size={size}")
    for corpus in dict.fromkeys(line.corpus for line, _ in measured):
        inside = [(line, numbers) for line, numbers in measured if line.corpus == corpus]
        config = config_of(table, inside[0][0], size)
        body, read = config["body"], epochs(config, config["steps"], WORDS[corpus])
        lines += [
            (
                f"\nOurs: {corpus}, {config['steps']:,} updates of {config['tokens_per_update']:,}"
                f" tokens, {read:.1f} epochs; {body['name']} of width"
                f" {body.get('widths', body['features'])}. One run each.\n"
            ),
            TITLE,
            *(cells(line, numbers) for line, numbers in inside),
        ]
        for tuned in [line for line, _ in inside if line.tuned][:1]:
            config = config_of(table, tuned, size)
            lines += [
                f"\nFinetuned: {config['steps']:,} updates, {TUNED_EPOCHS} epochs of"
                f" {tuned.tuned:,} words, at a rate of {config['optimizer']['learning_rate']:g},"
                " with the words of both texts as vocabulary."
            ]
    return "\n".join([*lines, ""])


def figure_of(table: Table, measured: list[tuple[Line, dict]], size: str) -> dict:
    """The numbers of the table's figure, see `benchmarks.figures.table`: test perplexities, and
    validation losses by updates or operations, or training losses where one evaluation is all
    there is. Losses are a run's, whatever it was scored on. Runs that diverged are left out.
    """
    rows, drawn = [], set()
    for line, numbers in measured:
        if "diverged" in numbers:
            continue
        scale = numbers["operations"] / 1e12 if table.operations else 1
        losses = numbers["losses"]
        split = "validation" if len(losses["validation"]) > 1 else "training"
        name = cells(line, numbers).split("|")[1].strip().replace("`", "")
        rows.append(
            {
                "corpus": line.target or line.corpus,
                "row": name.replace(f", {line.target}", "", 1) if line.target else name,
                "value": numbers["test"][line.scored],
                "paper": line.paper.test,
                "losses": []
                if line.run in drawn
                else [(scale * step, loss) for step, loss in losses[split]],
            }
        )
        drawn.add(line.run)
    return {
        "kind": "table",
        "title": f"{table.title}, {size} size",
        "measure": "test perplexity",
        "by": "TFLOP of training" if table.operations else "updates",
        "rows": rows,
    }


def write_section(path: Path, text: str) -> None:
    """Puts a section into a Markdown file: in place of the one with the same heading, or at the
    end.
    """
    parts = [part.rstrip("\n") + "\n" for part in path.read_text().split("\n## ")]
    text = text.removeprefix("## ")
    headings = [part.splitlines()[0] for part in parts]
    at = headings.index(text.splitlines()[0]) if text.splitlines()[0] in headings else len(parts)
    parts[at : at + 1] = [text]
    with replacing(path) as file:
        file.write("\n## ".join(parts).encode())


def main(name: str, settings) -> None:
    """Trains the rows of a table, or the one that --only names, then prints and writes the
    table.
    """
    check_known(f"TABLE={name}", name, TABLES)
    size = settings.size
    whole = TABLES[name]().lines[size]
    fetched = [key for key, f in CORPORA.items() if f.SETTINGS["data.corpus"] != "text_files"]
    needed = {corpus for line in whole for corpus in (line.corpus, line.target)}
    if missing := needed - {"", *fetched, *directories(settings.corpora)}:
        raise InputError(
            f"{name} reads {', '.join(sorted(missing))}: pass --corpora={min(missing)}=DIR,…"
        )
    lines = [line for line in whole if settings.glove or "glove" not in line.clusters]
    if settings.only:
        names = {line.run: line for line in lines}
        check_known(f"--only={settings.only}", settings.only, names)
        numbers = measure(name, names[settings.only], settings)
        return write_json(runs_of(name, settings) / settings.only / "row.json", numbers)
    if not importlib.util.find_spec("matplotlib"):
        raise InputError("benchmarks.tables draws a figure: pip install -r requirements-bench.txt")
    if left := len(whole) - len(lines):
        print(f"{left} rows need vectors of GloVe and are left out: pass --glove=FILE")
    measured = [(line, numbers_of(name, line, settings)) for line in lines]
    text, path = section(name, size, measured), RESULTS.with_name(f"{name}_{size}.json")
    print(text)
    figures.write(path, figure_of(TABLES[name](), measured, size))
    text += f"\n![test perplexity, ours and published, and losses]({path.stem}.png)\n"
    write_section(RESULTS, text)


if __name__ == "__main__":
    flags.DEFINE_enum("size", "cpu", ["cpu", "full"], "Size of the models.")
    flags.DEFINE_list(
        "corpora",
        [],
        "Local copies of corpora: penn_treebank=DIR,wikitext2=DIR; others are downloaded.",
    )
    flags.DEFINE_string("glove", "", "File of GloVe vectors, to cluster words by.")
    flags.DEFINE_string("lexicon", "", "WordNet's directory or a .jsonl file, for rows of GroC.")
    flags.DEFINE_string("only", "", "Only train and score this run, such as penn_treebank-awd_sm.")
    flags.DEFINE_string("workdir", "runs/tables", "Directory for the runs.")
    commands.run(lambda table: main(table, flags.FLAGS), positional=["TABLE"])
