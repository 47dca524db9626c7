"""The table of cases: every value of every choice at least once, in pairs, on tiny shapes.

A case is commands that run one after the other in one directory, `{here}`, and what is read after
each: metrics and parameters of a run, results of an evaluation, and so on.
"""

import json

import numpy as np

# What the next commit calls otherwise: old beginning of a flag, or of the name of a result, to the
# new one. The new side gets the flags, and is compared under the old names; None: it has none.
FLAGS: dict[str, str | None] = {}
NAMES: dict[str, str | None] = {}

# The small settings of each class; those of a run besides. No updates are clipped and the rate is
# 1, so that 20 updates of the parameters are the sum of 20 gradients, unless a case says otherwise.
FILTERS = ((1, 8), (2, 8), (3, 16))
LETTERS = {"width": 6, "filters": FILTERS, "length": 8}
TRANSFORMER = {"layers": 1, "features": 32, "heads": 2, "feed_forward": 64}
TRANSFORMER |= {"dropout": 0.1, "attention_dropout": 0.1}
AWD = {"input_dropout": 0.3, "hidden_dropout": 0.2, "dropout": 0.2, "weight_drop": 0.3}
STEPS = {"features": 32, "widths": (24, 32)}
GATED = {"features": 32, "blocks": ((1, 3, 32), (2, 1, 12, 3, 12, 1, 32)), "dropout": 0.1}
PARTS = {
    "input": {
        "lookup": {"width": 0},
        "adaptive": {"cutoffs": (20, 60)},
        "char_cnn": LETTERS,
        "groc": LETTERS | {"strides": (1, 2, 1), "lexicon": "{lexicon}", "definition": 4},
    },
    "body": {
        "transformer": TRANSFORMER,
        "transformer_post_norm": TRANSFORMER,
        "gated_conv": GATED,
        "lstm": STEPS | {"dropout": 0.2},
        "awd_lstm": STEPS | AWD,
    },
    "output": {
        "softmax": {},
        "adaptive": {},
        "hierarchical": {},
        "sampled": {"samples": 24},
        "nce": {"samples": 24},
        "differentiated": {},
    },
    "output.table": {
        "own": {},
        "tied": {},
        "mapped": {},
        "composed": LETTERS | {"correction": 8},
        "assembled": {},
    },
    "optimizer": {
        "sgd": {"learning_rate": 1.0, "clip_norm": 1e6, "l2_decay": 0.0},
        "nag": {"learning_rate": 0.2, "momentum": 0.9, "clip_norm": 0.5},
        "adam": {"learning_rate": 0.01, "clip_norm": 0.25},
        "nt_asgd": {"learning_rate": 2.0, "nonmono": 1, "clip_norm": 0.25},
    },
    "schedule": {
        "constant": {"warmup_steps": 0},
        "cosine_cycles": {"warmup_steps": 3, "cycle_steps": 6, "cycles": 2},
        "inverse_square_root": {"warmup_steps": 4},
        "plateau": {"warmup_steps": 0, "patience": 1, "threshold": 0.2},
    },
}
RUN = {
    "steps": 20,
    "tokens_per_update": 128,
    "tokens_per_device": 128,
    "log_every": 1,
    "evaluate_every": 10,
    "checkpoint_every": 20,
    "keep": 9,
    "metrics.tensorboard": False,
    "metrics.norms": True,
    "data.corpus": "text_files",
    "data.path": "{text}",
    "data.cache": "{cache}",
    "data.threshold": 1,
    "data.vocabulary_size": 150,
    "batches.sequence_length": 16,
}
# Cases whose names begin so are compared to a tolerance: several devices sum in another order.
CLOSE = "8 devices", "2 devices", "2 hosts"
USUAL = {"input": "lookup", "body": "transformer", "output": "softmax", "output.table": "own"}
USUAL |= {"optimizer": "sgd", "schedule": "constant"}
STREAMS = {"batches.layout": "streams"}


def flags(choices: str, **changes) -> list[str]:
    """The flags of a run: the classes that `choices` names, as "lookup lstm tied", and changes of
    keys."""
    names, given = dict(USUAL), choices.split()
    if given[:1] == ["adaptive"]:  # the input; the output of this name stands behind the body's
        names["input"] = given.pop(0)
    for name in given:
        names[next(g for g in reversed(PARTS) if name in PARTS[g])] = name
    settings = dict(RUN)
    for group, name in names.items():
        settings[f"{group}.name"] = name
        settings |= {f"{group}.{key}": value for key, value in PARTS[group][name].items()}
    settings |= changes
    return [f"--config.{key}={value}" for key, value in settings.items()]


def step(label, argv, read, place="{here}/run", devices=1, hosts=1) -> dict:
    """A command and what is read after it, at `place`."""
    return dict(label=label, argv=argv, read=read, place=place, devices=devices, hosts=hosts)


def train(choices: str, label="train", place="{here}/run", more=(), devices=1, hosts=1, **changes):
    """A run of train.py; `changes` are settings by key."""
    argv = ["train.py", "--config=configs/quickstart.py", f"--workdir={place}", *more]
    return step(label, argv + flags(choices, **changes), "run", place, devices, hosts)


def evaluate(*arguments: str, place="{here}/run", devices=1) -> dict:
    """A run of evaluate.py on what a case trained before."""
    label = " ".join(["evaluate", *arguments]).replace("--", "")
    argv = ["evaluate.py", f"--workdir={place}", *arguments]
    return step(label, argv, "evaluation", place, devices)


def cases(reference=None, wordnet=None) -> dict[str, list[dict]]:
    """The commands of every case, by its name. Directories that may be missing are None."""
    found = bodies() | inputs_and_outputs() | training() | texts() | devices()
    found |= evaluations() | other_programs(reference)
    if wordnet:
        lexicon = {"input.lexicon": str(wordnet)}
        for form in "paper", "code":
            found[f"groc, WordNet, {form}"] = [
                train("groc tied", **lexicon, **{"input.form": form})
            ]
    return found


def bodies() -> dict:
    """Every body in its forms, with inputs and outputs that are cheap."""
    found = {}
    for name, changes in {
        "learned": {"body.positions": "learned", "body.max_positions": 16, "body.layers": 2},
        "alibi, chunked": {"body.positions": "alibi", "body.attention": "chunked"},
        "no positions, remat": {"body.positions": "none", "body.remat": "all", "body.layers": 2},
        "no final norm, unrolled": {
            "body.final_norm": False,
            "body.unroll": "all",
            "body.layers": 2,
            "body.activation_dropout": 0.2,
        },
    }.items():
        found[f"transformer, {name}"] = [train("transformer tied", **changes)]
    for final in True, False:
        found[f"post norm, final norm {final}"] = [
            train("transformer_post_norm", **{"body.final_norm": final, "body.layers": 2})
        ]
    for activation, form in zip(
        ("glu", "gtu", "bilinear", "relu", "tanh", "linear"), ("paper", "fairseq") * 3, strict=True
    ):
        changes = {"body.activation": activation, "body.form": form}
        changes |= {"body.weight_norm": activation != "gtu", "optimizer.learning_rate": 0.3}
        changes |= {"body.output_width": 24} if activation == "tanh" else {}
        found[f"gated_conv, {form}, {activation}"] = [train("gated_conv", **changes)]
    found["gated_conv, fairseq, glu, streams"] = [
        train("gated_conv", **STREAMS, **{"body.form": "fairseq"})
    ]
    for biases in 1, 2:
        found[f"lstm, {biases} biases"] = [
            train("lstm tied", **STREAMS, **{"body.biases": biases, "output.table.bias": True})
        ]
    penalties = {"body.ar": 2.0, "body.tar": 1.0, "input.word_dropout": 0.1}
    found["awd_lstm, penalties"] = [train("awd_lstm tied", **STREAMS, **penalties)]
    found["awd_lstm, rows alone"] = [train("awd_lstm", **{"body.biases": 1})]
    return found


def inputs_and_outputs() -> dict:
    """Every input, output and table."""
    cut, tied = {"output.table.cutoffs": (20, 60)}, "adaptive transformer adaptive tied"
    dropped = {"output.tail_dropout": 0.2, "output.input_dropout": 0.1, "input.word_dropout": 0.1}
    smooth = {"output.label_smoothing": 0.1, "output.z_loss": 0.01}
    narrow = {"input.width": 16, "input.factor": 2}
    own = {"output.table.factor": 2, "output.table.bias": True, "output.table.width": 24}
    elmo = {"input.letters": "elmo", "input.strides": (1, 2, 1), "input.activation": "selu"}
    grounded = {"output.table.depth": 0, "output.table.bias": "predicted"}
    as_code = {"input.combine": "add", "input.mean": "most", "input.share": 0.5}
    composed = {"output.table.letters": "elmo", "output.table.bias": "own"}
    deep = {"output.table.depth": 2, "output.table.layer_dropout": 0.2, "output.table.bias": "own"}
    table = {
        "adaptive, tied, dropouts": (tied, dropped | {"body.activation_dropout": 0.1}),
        "adaptive, tied, smoothed, own projections": (
            tied,
            smooth | narrow | {"output.table.share_projections": False, "input.scaled": True},
        ),
        "adaptive, tied, shared head, own head": (
            tied,
            narrow | {"output.table.share_head_projection": True},
        ),
        "adaptive, tied, own head, bias": (
            tied,
            {"output.table.own_head": True, "output.table.bias": True, "output.tails": "chunks"},
        ),
        "adaptive, assembled": (
            "adaptive transformer softmax assembled",
            {"output.table.bias": "own", "output.table.dropout": 0.1},
        ),
        "lookup, adaptive, own": ("lookup gated_conv adaptive own", cut | own | smooth),
        "lookup, adaptive, tied and cut": ("lookup transformer adaptive tied", cut),
        "lookup, softmax, own, narrow": (
            "lookup transformer softmax own",
            {"input.width": 16, "output.table.width": 16, "output.table.weight_norm": True}
            | {"input.init_range": 0.1, "output.label_smoothing": 0.1},
        ),
        "lookup, softmax, tied, deviation": (
            "lookup gated_conv softmax tied",
            {"input.init_deviation": 0.1, "output.z_loss": 0.01},
        ),
        "lookup, mapped, bilinear": (
            "lookup awd_lstm softmax mapped",
            STREAMS | {"output.table.form": "bilinear", "output.table.dropout": 0.2},
        ),
        "lookup, mapped, residual": ("lookup lstm softmax mapped", STREAMS | deep),
        "lookup, mapped, adaptive": (
            "lookup transformer adaptive mapped",
            cut | {"output.table.activation": "tanh"},
        ),
        "lookup, composed": ("lookup awd_lstm softmax composed", STREAMS | composed),
        "char_cnn, adaptive, own": ("char_cnn transformer adaptive own", cut),
        "char_cnn, softmax, tied": ("char_cnn transformer softmax tied", elmo),
        "char_cnn, composed": (
            "char_cnn gated_conv softmax composed",
            {"input.highway_layers": 2, "output.table.correction": 0},
        ),
        "char_cnn, sparse": ("char_cnn transformer softmax tied", {"compose_share": 0.3}),
        "groc, mapped": ("groc awd_lstm softmax mapped", STREAMS | grounded),
        "groc, as the code": ("groc awd_lstm softmax mapped", STREAMS | deep | as_code),
        "groc, adaptive": ("groc transformer adaptive mapped", cut | {"input.definition": 0}),
        "groc, sparse": ("groc transformer softmax tied", {"compose_share": 0.3}),
        "hierarchical, own": ("lookup transformer hierarchical own", {"output.tail_dropout": 0.2}),
        "hierarchical, tied, 7 classes": (
            "lookup awd_lstm hierarchical tied",
            STREAMS | {"output.classes": 7},
        ),
        "hierarchical, bands": ("lookup gated_conv hierarchical own", cut | own),
        "sampled, log uniform": ("lookup transformer sampled own", {"output.table.bias": True}),
        "sampled, unigram": (
            "lookup lstm sampled tied",
            STREAMS | {"output.proposal": "unigram", "output.input_dropout": 0.1},
        ),
        "nce, unigram": ("lookup transformer nce tied", {"output.proposal": "unigram"}),
        "nce, log uniform": ("lookup gated_conv nce own", {"output.table.bias": True}),
        "differentiated, projections": ("lookup transformer differentiated own", cut),
        "differentiated, slices": (
            "lookup transformer differentiated own",
            {"output.form": "slices", "output.table.projected": False}
            | {"output.table.cutoffs": (20,), "output.table.factor": 3},
        ),
    }
    slow = {"optimizer.learning_rate": 0.3}
    return {name: [train(what, **(slow | more))] for name, (what, more) in table.items()}


def training() -> dict:
    """Optimizers, schedules, precision, accumulation, resuming, starting from another run."""
    tied, often = "adaptive transformer adaptive tied", {"evaluate_every": 2}
    awd = "lookup awd_lstm softmax tied"
    found = {
        "nag, cosine_cycles": [train(f"{tied} nag cosine_cycles")],
        "nag, decoupled decay, inverse_square_root": [
            train(f"{tied} nag inverse_square_root", **{"optimizer.decoupled_decay": 0.01})
        ],
        "sgd, l2 decay, plateau": [
            train(
                "lstm plateau",
                **STREAMS,
                **often,
                **{"optimizer.l2_decay": 0.01, "optimizer.clip_norm": 0.25},
            )
        ],
        "adam, l2 decay, plateau that ends": [
            train(
                "lstm adam plateau",
                **STREAMS,
                **often,
                **{"optimizer.l2_decay": 0.01, "schedule.divisions": 2, "schedule.factor": 10.0},
            )
        ],
        "adam, decoupled decay, inverse_square_root": [
            train(
                "transformer adam inverse_square_root tied", **{"optimizer.decoupled_decay": 0.01}
            )
        ],
        "nt_asgd, paper": [train(f"{awd} nt_asgd", **STREAMS, **often), evaluate()],
        "nt_asgd, torch": [
            train(f"{awd} nt_asgd", **STREAMS, **often, **{"optimizer.form": "torch"}),
            evaluate("--rows=4"),
        ],
        "nt_asgd, averages from the first update": [
            train(f"{awd} nt_asgd", **STREAMS, **often, **{"optimizer.nonmono": 0})
        ],
        "bfloat16, transformer": [train(f"{tied} nag cosine_cycles", dtype="bfloat16")],
        "bfloat16, gated_conv": [train("gated_conv nag", dtype="bfloat16")],
        "bfloat16, awd_lstm": [train(f"{awd} adam", dtype="bfloat16", **STREAMS)],
        "bfloat16, groc": [train("groc transformer softmax mapped adam", dtype="bfloat16")],
        "accumulation": [train(f"{tied} nag", tokens_per_device=32)],
        "accumulation, streams": [train(f"{awd} adam", tokens_per_device=64, **STREAMS)],
        "early stopping": [train("adam", early_stopping=1, **often, **{"seed": 3})],
        "skipped updates": [train("adam", **{"divergence.policy": "skip", "divergence.loss": 4.9})],
    }
    for name, what, more in (
        ("nag", f"{tied} nag cosine_cycles", {}),
        ("plateau, streams", f"{awd} adam plateau", STREAMS | often),
        ("nt_asgd, streams", f"{awd} nt_asgd", STREAMS | often),
    ):
        halves = [train(what, f"{n} updates", steps=n, **more) for n in (11, 20)]
        found[f"resume, {name}"] = halves
    other = {"data.path": "{other}", "optimizer.learning_rate": 0.1}
    for words in "new", "both":
        found[f"init_from, {words} words"] = [
            train(tied, "first", "{here}/first", steps=5),
            train(tied, more=["--init_from={here}/first"], init_words=words, **other),
        ]
    return found


def texts() -> dict:
    """Units, break modes, layouts."""
    tied = "adaptive transformer adaptive tied"
    found = {
        "sub-words": [train(tied, **{"data.codes": 40}), evaluate("--context=4")],
        "sub-words, streams": [
            train("lookup lstm softmax tied", **STREAMS, **{"data.codes": 80, "data.lower": True})
        ],
        "tokenised, lower case, rare words": [
            train(
                tied,
                **{"data.tokeniser": "moses", "data.lower": True}
                | {"data.threshold": 3, "data.limit": 90},
            ),
            evaluate(),
        ],
    }
    for mode, layout, what in (
        ("complete", "packed", tied),
        ("complete_doc", "packed", "gated_conv"),
        ("eos", "packed", "awd_lstm"),
        ("eos", "similar", tied),
        ("complete", "similar", "lstm"),
    ):
        how = {"batches.break_mode": mode, "batches.layout": layout}
        found[f"{mode}, {layout}"] = [
            train(what, **how, **{"optimizer.learning_rate": 0.3}),
            evaluate(),
        ]
    return found


def devices() -> dict:
    """Eight simulated devices and two hosts. `CLOSE` names what is compared to 1e-6."""
    tied, awd = "adaptive transformer adaptive tied nag", "lookup awd_lstm softmax tied adam"
    return {
        "8 devices": [train(tied, devices=8), evaluate(devices=8)],
        "8 devices, fsdp": [train(tied, devices=8, fsdp=8)],
        "8 devices, fsdp of 2, bfloat16 sums": [
            train("lookup gated_conv softmax own nag", devices=8, fsdp=2, gradient_sums="bfloat16")
        ],
        "8 devices, streams": [train(awd, devices=8, **STREAMS)],
        "8 devices, groc": [train("groc transformer softmax mapped adam", devices=8, fsdp=4)],
        "8 devices, sampled": [train("transformer sampled own", devices=8, fsdp=4)],
        "2 devices, accumulation": [train(tied, devices=2, tokens_per_device=16, fsdp=2)],
        "2 hosts": [train(tied, hosts=2, fsdp=2)],
        "2 hosts, streams": [train(awd, hosts=2, **STREAMS)],
    }


def evaluations() -> dict:
    """Every method, window and vocabulary of evaluate.py, score and generate."""
    grid = ("--split=validation", "--model_weight=0.8,0.9")
    cache = ("--method=cache", *grid)
    words = ("--vocabulary=union", "--data_path={other}")
    awd, groc = "lookup awd_lstm softmax tied adam", "groc awd_lstm softmax mapped adam"
    grounded = {"output.table.depth": 0, "output.table.bias": "predicted"}
    run = "--workdir={here}/run"
    dynamic = "--method=dynamic", "--window=6", "--rate=0.001", "--statistics=20"
    spoken = step("score", ["score", run], "output")
    return {
        "evaluation of a transformer": [
            train("adaptive transformer adaptive tied nag"),
            evaluate("--context=0,4,12"),
            evaluate("--window=24", "--context=8", "--checkpoint=latest"),
            evaluate("--break_mode=complete", "--window=20"),
            evaluate("--split=train", "--rows=2"),
            evaluate(*words, "--uniform=0.05"),
        ],
        "caches": [
            train("adaptive transformer adaptive tied nag"),
            evaluate(*cache, "--theta=0,0.5", "--cache_size=100"),
            evaluate(*cache, "--cache=unbounded", "--neighbours=30"),
            evaluate(*cache, "--cache=unigram"),
            evaluate(*cache, "--cache=unigram_softmax"),
            evaluate("--method=knn", *grid, "--temperature=1,10", "--neighbours=20"),
            evaluate("--method=knn", "--datastore={other}"),
        ],
        "dynamic evaluation": [
            train("lookup transformer softmax tied nag", **{"body.positions": "alibi"}),
            evaluate(*dynamic),
            evaluate(*dynamic[:2], "--rule=sgd", "--rate=0.1", "--decay=0.01"),
        ],
        "evaluation of streams": [
            train(awd, **STREAMS),
            evaluate(),
            evaluate("--rows=4", "--context=8"),
            evaluate("--method=cache", "--theta=0.3"),
            evaluate(*dynamic),
            evaluate("--method=knn"),
        ],
        "new words": [
            train(groc, **STREAMS, **grounded),
            evaluate(*words),
            evaluate(*words, "--down_weight=0.1", "--method=cache"),
            evaluate("--share=0.5"),
        ],
        "score and generate": [
            train("adaptive transformer adaptive tied nag"),
            spoken,
            step("words", ["score", run, "--words", "--context_from=previous"], "output"),
            step("generate", ["generate", run, "--prompts=-", "--words=20"], "output"),
            step("beams", ["generate", run, "--prompts=-", "--beams=3", "--words=8"], "output"),
        ],
        "score and generate of streams": [
            train(awd, **STREAMS),
            spoken,
            step("generate", ["generate", run, "--prompts=-", "--words=20"], "output"),
        ],
        "clusters": [
            train("lookup transformer softmax own", "first", "{here}/first", steps=5),
            step(
                "kmeans",
                ["clusters", "--vocabulary={here}/first", "--embeddings={here}/first"]
                + ["--method=kmeans", "--clusters=4", "--output={here}/clusters.txt"],
                "file",
                "{here}/clusters.txt",
            ),
            *[
                train(
                    what,
                    what,
                    place="{here}/" + what.split()[2],
                    **{"output.clusters": "{here}/clusters.txt"},
                )
                for what in ("lookup transformer hierarchical own", "lookup lstm adaptive tied")
            ],
        ],
    }


def other_programs(reference) -> dict:
    """Conversion of the checkpoints among the tests' fixtures and of those in `reference`; export;
    and the shapes of all rows."""
    found = {}
    run, exported, scorer = "--workdir={here}/run", "{here}/exported", "{here}/scorer"
    for name, what, more in (
        ("transformer", "adaptive transformer adaptive tied nag", {}),
        ("gated_conv", "lookup gated_conv adaptive own nag", {"output.table.cutoffs": (20,)}),
        ("awd_lstm", "lookup awd_lstm softmax tied adam", STREAMS),
    ):
        program = ["--format=stablehlo", "--rows=2", "--window=12"]
        found[f"export, {name}"] = [
            train(what, steps=5, **more),
            step("export", ["export", run, f"--output={exported}"], "safetensors", exported),
            evaluate(place=exported),
            step("program", ["export", run, f"--output={scorer}", *program], "safetensors", scorer),
            step("program", ["examples/stablehlo_scorer.py", scorer], "output"),
        ]
    found["rows of all configs"] = [step("shapes", ["rows"], "rows")]
    return found


def write_texts(here) -> dict[str, str]:
    """Writes what the cases read into a directory; the places of it by name."""
    bits = np.random.Generator(np.random.Philox(1))
    syllables = "ba de fi lo mu na pe ri so tu".split()
    words = "the cat dog house tree king water bread Stone river".split()
    for n in range(110):
        words.append("".join(syllables[int(digit)] for digit in f"{n * 37 % 1000}"))
    chance = 1 / np.arange(1, len(words) + 1)
    places = {}
    for name, own in ("text", words), ("other", [*words[30:], *"snow moon Fire lamp".split()]):
        (here / name).mkdir()
        places[name] = str(here / name)
        share = chance[: len(own)] / chance[: len(own)].sum()
        for split, lines in ("train", 300), ("valid", 24), ("test", 26):
            text = [" ".join(own), "the <unk> fell ."] if split == "train" else ["Hapax , <unk>"]
            for n in range(lines):
                line = bits.choice(len(own), int(bits.integers(2, 14)), p=share)
                text.append(" ".join(own[word] for word in line) if n % 7 else "")
            (here / name / f"{split}.txt").write_text("\n".join(text) + "\n")
    lexicon = here / "lexicon.jsonl"
    with lexicon.open("w") as file:
        for n, word in enumerate(words[::2]):
            related = [words[n // 3], words[-n], "nowhere"][: n % 4]
            defined = [words[(n * k) % len(words)] for k in range(n % 6)]
            line = {"word": word, "relations": related, "definition": defined}
            file.write(json.dumps(line) + "\n")
    given = here / "given.txt"
    given.write_text("the cat dog\nking bread the tree\n")
    return places | {"lexicon": str(lexicon), "given": str(given)}
