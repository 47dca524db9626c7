"""Command lines with a mistake in them, and what they say: the table of
`tests/test_wrong_inputs.py`.
"""

from typing import NamedTuple

from adaptive_jax.config.keys import resolve
from tests.conftest import ROOT

DIRECTORY, NOTHING, LINK = "a directory in its place", "removed", "a link to nowhere"
HUGE = "1" + 30 * "0"


class Row(NamedTuple):
    """A mistake.

    line: the command. {train} is the small run's, {evaluate} and the others below as `LINES`;
        {text}, {tmp} and {trained} are directories; {run} is a workdir that does not exist, or a
        copy of {trained} if the damage is in run/.
    says: parts of the printed line.
    damage: a file below {tmp} and its content, or a function from what it was; in text/, that is a
        copy of {text}, and {train} reads it.
    by_process: whether the command runs as a user runs it, in a process of bounded memory.
    """

    name: str
    line: str
    says: tuple[str, ...]
    damage: tuple[str, object] | None = None
    by_process: bool = False


LINES = {
    "quick": "train.py --config=configs/quickstart.py --workdir={run}",
    "own": "train.py --config=configs/own_text.py --workdir={run} --cache_dir={tmp}/cache",
    "evaluate": "evaluate.py --workdir={trained}",
    "prepare": (
        "-m adaptive_jax prepare --config=configs/quickstart.py"
        " --config.data.corpus=text_files --config.data.path={text} --cache_dir={tmp}/cache"
        " --config.data.threshold=1"
    ),
    "convert": "-m adaptive_jax convert",
    "checkpoint": "tests/fixtures/fairseq/lm_post_norm.pt",
    "fconv_lm": "tests/fixtures/gcnn/plain_full.pt",
    "awd_lstm": "tests/fixtures/awd_lstm/model_save.pt",
    "dict": "tests/fixtures/fairseq/dict.txt",
}


def rows(line, *cases, by_process=0):
    """Rows of one command: what is added to it, and what it says. The first `by_process` of them
    run in processes.
    """
    return [
        Row(f"{line} {added}".strip(), f"{line} {added}", says, None, number < by_process)
        for number, (added, *says) in enumerate(cases)
    ]


TRAIN_FLAGS = rows(
    "{quick}",
    ("--config", "--config has no value"),
    ("--workdir", "Missing value for flag --workdir"),
    ("--hours", "Missing value for flag --hours"),
    ("--wrkdir=x", "'wrkdir'", "Did you mean: workdir ?"),
    ("--dry-run", "'dry-run'", "Did you mean: dry_run ?"),
    ("dry_run", "'dry_run'", "--flag=value"),
    ("--dry_run=maybe", "--dry_run=maybe", "boolean"),
    ("--hours=-1", "--hours", "got -1.0"),
    ("--hours=1h", "--hours=1h", "float"),
    ("--split=test", "Unknown", "'split'"),
    ("--config.steps 5", "'5'", "--flag=value"),
    ("--config.optimizer.name=None", "config.optimizer.name='None'", "is not one of"),
    (
        "--config.optimizer.name=adamw --config.optimizer.eps=1e999",
        "optimizer.eps=inf",
        "must be a finite number",
    ),
    (
        "--config.early_stopping=3 --config.evaluate_every=0 --config.checkpoint_every=0",
        "early_stopping=3",
        "use evaluate_every=60",
    ),
    (
        "--config.batches.layout=streams",
        "layout='streams' needs a body",
        "body.name='transformer' does not: use batches.layout=packed",
    ),
    ("--nodry_run=3", "--nodry_run=3", "argument"),
    ("--init_checkpoint=latest", "init_checkpoint=latest", "pass --init_from=RUN"),
    ("--config.body/layers=4", "config.body/layers"),
    ("—dry_run", "'—dry_run' is not a flag"),
    ("--config.input.cutoffs=-5 --dry_run", "-5", "increase"),
    ("--flagfile=/nowhere", "/nowhere"),
    (f"--config.input.cutoffs={HUGE}", "input.cutoffs", "2,147,483,646"),
    ("--coordinator=localhost:1234", "--hosts=None"),
    ("--hosts=2 --host=2 --coordinator=a:1", "--host=2"),
    ("--hosts=2 --host=-1 --coordinator=a:1", "--host=-1"),
    ("--hosts=2 --host=0 --coordinator=", "--coordinator=", "HOST:PORT"),
    ("--hosts=2 --host=0 --coordinator=a:b", "--coordinator=a:b", "HOST:PORT"),
    ("--hosts=2 --host=0 --coordinator=a:99999", "--coordinator=a:99999", "65,535"),
)

CONFIGS = rows(
    "train.py --workdir={run}",
    ("", "--config is missing", "--config=configs/NAME.py"),
    ("--config.steps=3", "--config.steps", "--config is missing"),
    ("--config=README.md", "README.md, line ", "Error: "),
)

OWN = rows(
    "{own}",
    ("", "--config.data.path=DIR"),
    ("--config.data.path=/nowhere", "/nowhere", "does not exist"),
    ("--config.data.path=~nosuchuser/x", "~nosuchuser/x", "must be a path"),
    (
        "--config.data.path={text}/train.txt --cache_dir=~nosuchuser",
        "~nosuchuser",
        "must be a path",
    ),
)

# Much too much: refused before anything large is made.
SIZES = rows(
    "{train}",
    (
        "--config.body.features=1000000000 --config.body.heads=1",
        "GB a device",
        "make the model smaller",
    ),
    ("--config.body.layers=1000000000", "GB a device", "make the model smaller"),
    (
        (
            "--config.batches.sequence_length=1000000000 --config.tokens_per_update=1000000000"
            " --config.tokens_per_device=1000000000"
        ),
        "GB a device",
        "sequence_length",
    ),
    (
        "--config.body.heads=1000000000",
        "config.body: ",
        "1000000000 heads",
        "multiple of heads",
    ),
    ("--config.input.factor=1000000000", "1000000000", "a smaller factor"),
    ("--config.data.codes=1000000", "data.codes=1000000", "or less"),
    ("--config.data.limit=3", "cutoff 60", "use cutoffs"),
    ("--config.fsdp=3", "fsdp=3", "choose"),
    ("--config.tokens_per_update=0", "tokens_per_update must be in", "got 0"),
    by_process=1,
)

PLACES = rows(  # found before the text is looked for
    "{train} --config.data.path={tmp}/none",
    ("--workdir=", "--workdir is missing"),
    ("--workdir=/dev/null/x", "/dev/null/x", "another place"),
    ("--workdir={text}/train.txt", "train.txt", "another place"),
    ("--init_from={tmp}", "holds no run"),
    ("--workdir=~nosuchuser/x", "~nosuchuser/x", "must be a path"),
    (f"--workdir={300 * 'x'}", 300 * "x", "another place"),
    ("--workdir=s3://b/x", "s3://b/x must be a path or gs://", "docs/runs.md"),
    ("--workdir='{tmp}/[x]'", "[x]", "another name"),
    ("--workdir='{tmp}/[x]' --dry_run", "[x]", "another name"),
    ("--cache_dir=", "--cache_dir=''", "on a local disk"),
    ("--config.data.path={text} --cache_dir=/dev/null/x", "/dev/null/x", "another place"),
    (
        "--config.data.path={text} --cache_dir={text}/train.txt",
        "cannot use ",
        "train.txt",
        "Not a directory",
    ),
    ("--cache_dir=~nosuchuser", "~nosuchuser", "without the ~"),
    ("--cache_dir=gs://b", "gs://b", "on a local disk"),
    ("--config.data.path=/nowhere", "/nowhere", "does not exist"),
    ("--config.data.path=/proc", "/proc", "no train split"),
    ("--config.data.path=~nosuchuser", "~nosuchuser", "without the ~"),
    (f"--config.data.path={5000 * 'x'}", "xxx", "another place"),
    ("--config.data.path=gs://b/x", "gs://b/x", "on a local disk"),
    ("--config.data.path=gs://b/x --dry_run", "gs://b/x", "on a local disk"),
)

EVALUATE = rows(
    "{evaluate}",
    ("--checkpoint=foo", "'foo'", "it has steps"),
    ("--checkpoint=", "''", "it has steps"),
    ("--split=dev", "--split=dev", "train|validation|test"),
    ("'--context=\"1'", '--context="1', "Unable to parse"),
    (f"--window={HUGE}", HUGE, "use that or less"),
    ("--data_path=", "pass --data_path=DIR"),
    ("--data_path={tmp}", "no test split"),
    ("--workdir=" + str(ROOT), "holds no run"),
    ("--workdir=/dev/null", "/dev/null"),
    ("--workdir={text}/train.txt", "train.txt", "holds no run"),
    ("--workdir=~nosuchuser", "~nosuchuser"),
    by_process=1,
)

PREPARE = rows(
    "{prepare}",
    ("--config.data.threshold=0", "data.threshold", "got 0"),
    ("--config.data.limit=2", "data.limit=2", "3 or more"),
    ("--config.data.tokeniser=mose", "'mose'", 'Did you mean "moses"'),
    ("--config.data.corpus=treebank", "'treebank'", 'Did you mean "penn_treebank"'),
    ("--config.data.codes=-1", "data.codes", "got -1"),
    ("--config.data.codes=100000", "data.codes=100000", "or less"),
    ("--config.data.codes=9 --config.data.limit=50", "data.codes=9", "data.limit=0"),
    ("--config.data.codes=9 --config.data.threshold=2", "data.codes=9", "data.threshold=1"),
    ("--config=configs/own_text.py", "run train.py"),
)

OTHERS = [
    *rows(
        "-m adaptive_jax clusters --vocabulary={trained} --output={tmp}/clusters.txt",
        ("--seed=3", "--seed does not fit --method=frequency"),
        (
            "--method=kmeans --embeddings={trained} --factor=4",
            "--factor does not fit --method=kmeans",
        ),
        ("--clusters=4 --cutoffs=10,20", "--clusters=4 has no effect with --cutoffs"),
        ("--config=configs/quickstart.py", "--config has no effect with --vocabulary and --output"),
    ),
    *rows(
        "-m adaptive_jax export --workdir={trained} --output={tmp}/export",
        ("--rows=2", "--rows has no meaning with --format=safetensors: leave it out"),
    ),
    *rows(
        "evaluate.py",
        ("", "--workdir is missing", "--workdir=DIRECTORY"),
        ("--workdir={run}", "run holds no run (no config.json)"),
        ("--workdir={run} --split=foo", "--split=foo", "train|validation|test"),
    ),
    *rows(
        "-m adaptive_jax prepare",
        ("", "--config is missing"),
    ),
    *rows(
        "-m adaptive_jax",
        ("trian", "'trian'", 'Did you mean "train"?'),
        ("train --config=configs/quickstart.py", "--workdir is missing"),
        by_process=2,
    ),
    *rows(
        "-m benchmarks.throughput",
        ("--rows=two", "--rows=two"),
        by_process=1,
    ),
    *rows(
        "-m benchmarks.layers",
        ("rnn", "LAYER=rnn", "lstm"),
        ("lstm --repeats=0", "--repeats", "got 0"),
        by_process=2,
    ),
    *rows(
        "-m benchmarks.tables",
        ("thesis", "TABLE=thesis", "thesis_4_3"),
        by_process=1,
    ),
    *rows(
        "{convert}",
        ("", "CHECKPOINT is missing"),
        ("{checkpoint}", "WORDS is missing"),
        ("{checkpoint} {dict}", "OUT_WORKDIR is"),
        ("{dict} {checkpoint} {run}", "dict.txt", "a whole file of torch.save"),
        ("{checkpoint} {checkpoint} {run}", "utf-8", "use the dict.txt"),
        ("{awd_lstm} {dict} {run}", "line 1", "is not one word", "one word a line"),
        ("{awd_lstm} {text} {run}", "and the checkpoint 37", "train.txt"),
        ("{awd_lstm} {trained} {run}", "train.txt", "No such file", "use the directory"),
        ("{fconv_lm} {dict} {run}", "of 1,000 words", "[240, "),
        ("{checkpoint} /dev/null {run}", "/dev/null has no words"),
        ("/dev/zero {dict} {run}", "/dev/zero", "a whole file of torch.save"),
        ("{text} {dict} {run}", "Is a directory"),
        ("{checkpoint} {dict} {text}", "already exists", "use a new directory"),
        ("{checkpoint} {dict} ''", "OUT_WORKDIR=''"),
        ("{checkpoint} {dict} /dev/null/x", "/dev/null", "another place"),
        ("{checkpoint} {dict} gs://b/x", "gs://b/x", "a local disk"),
        ("{checkpoint} {dict} ~nosuchuser/x", "~nosuchuser/x"),
        ("{checkpoint} {dict} 'a\\b'", "a\\b", "another name"),
        by_process=1,
    ),
]


def damaged(line, file, *cases):
    """Rows of one file of a run or a text: what stands in its place, and what the command says."""
    return [
        Row(f"{line}, {file} {number}", line, says, (file, content))
        for number, (content, *says) in enumerate(cases)
    ]


def other(old, new):
    """A function that replaces a part of a file."""

    def replaced(content):
        assert old in content
        return content.replace(old, new)

    return replaced


CONFIG = "run/config.json"
EVAL = "evaluate.py --workdir={run}"
HERE = "{train} --config.steps=242"
RUNS = [
    *damaged(
        EVAL,
        CONFIG,
        (b"", CONFIG, "restore it"),
        (b"[]", CONFIG, "restore it"),
        (b"null", CONFIG),
        (b"\xff\x00" * 99, CONFIG),
        (b"[" * 100_000, CONFIG, "restore it"),
        (DIRECTORY, CONFIG),
        (LINK, "holds no run"),
        (other(b'"features": 32', b'"features": NaN'), "config.body.features=nan"),
        (other(b'"features": 32', b'"features": 64'), "not those of config.json", "64"),
    ),
    *damaged(
        HERE,
        CONFIG,
        (b"[]", CONFIG),
        (b'{"name": "a package"}', CONFIG),
        (NOTHING, "checkpoints and no config.json", "another"),
    ),
    *damaged(EVAL, "run/vocabulary.txt", (NOTHING, "vocabulary.txt", "restore")),
    *damaged(HERE, "run/vocabulary.txt", (NOTHING, "vocabulary.txt", "restore")),
    *damaged(
        HERE,
        "run/metrics.jsonl",
        (b"\xff\n" * 9, "metrics.jsonl is damaged", "move it away"),
        (b"[]\n3\n", "is damaged"),
        (b'{"step": "x"}\n', "is damaged", "move it away"),
        (b"{}\n", "is damaged (step)"),
        (DIRECTORY, "metrics.jsonl", "Is a directory"),
    ),
    *damaged(
        HERE,
        "run/checkpoints",
        (b"x", "checkpoints", "another place"),
        (LINK, "checkpoints", "another place"),
    ),
    *damaged(
        EVAL,
        "run/checkpoints",
        (NOTHING, "no checkpoint yet", "checkpoint_every"),
        (b"x", "saved none yet"),
        (DIRECTORY, "saved none yet: wait", "checkpoint_every"),
    ),
]

TEXTS = [
    *damaged(
        "{train}",
        "text/train.txt",
        ("ä\n".encode("latin-1"), "line 1: not UTF-8", "convert"),
        (b"one word", "'the'", "train with a data.threshold above"),
        (DIRECTORY, "train.txt"),
        (LINK, "no train split"),
    ),
    *damaged(
        "{train}",
        "text/valid.txt",
        (b"", "valid.txt has no words"),
        (b"zebra\n", "'zebra'"),
        (NOTHING, "no validation split"),
    ),
    *damaged("{train}", "text/train.txt.gz", (b"x", "both train.txt", "keep one")),
    *damaged(
        "{prepare}",
        "text/test.txt",
        (b"\xff\n", "line 1: not UTF-8"),
        (b"zebra\n", "'zebra'"),
    ),
    *damaged(
        "{own} --config.data.path={tmp}/text2",
        "text2/all.txt",
        (b"", "0 line(s)"),
        (b"one\ntwo\n", "2 line(s)"),
        (b"\0\n\0\n\0\n\0\n", "NUL"),
    ),
]


def keys(group, prefix=""):
    """Every key of a config with its default."""
    for key, value in group.items():
        yield from (
            keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
        )


# What is no mistake, although the rows below would have it.
ACCEPTED = {("optimizer.clip_norm", "inf"), ("data.eos", "-1")}
# What a key's own check must find; tests/config/test_flags.py has values of another type.
WRONG_VALUES = {int: ("-1",), float: ("-1", "inf"), str: ("nonsense",)}
ANY_TEXT = {"data.path"}
OWN_TABLE = "output.table."  # the small run has another table
GENERATED = [
    Row(
        f"{key}={value}",
        f"{{train}} --dry_run --config.{key}={value}",
        (key.split(".")[-1], value),
    )
    for key, default in keys(resolve({}))
    for value in WRONG_VALUES.get(type(default), ())
    if key not in ANY_TEXT and (key, value) not in ACCEPTED and not key.startswith(OWN_TABLE)
]
TABLE = [
    *TRAIN_FLAGS,
    *CONFIGS,
    *OWN,
    *SIZES,
    *PLACES,
    *EVALUATE,
    *PREPARE,
    *OTHERS,
    *RUNS,
    *TEXTS,
]
