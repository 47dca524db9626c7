"""Language models with very large vocabularies, by command.

python -m adaptive_jax COMMAND --help
"""

import os
import sys

COMMANDS = {  # the module with its flags and its `main`, and what it does
    "train": ("training.command", "trains a language model"),
    "evaluate": ("scores.evaluate_command", "measures perplexity on a split"),
    "score": ("text.score_command", "gives log-probabilities of lines, or of words"),
    "generate": ("text.generate_command", "writes text after prompts"),
    "report": ("scores.report.command", "makes a page of figures of trained runs"),
    "convert": (
        "interop.convert_command",
        "reads a model that fairseq or the AWD-LSTM code trained",
    ),
    "export": ("interop.export_command", "writes a model for PyTorch, NumPy or StableHLO"),
    "prepare": ("data.corpora.prepare", "prepares the corpus of a config ahead of a run"),
    "clusters": ("training.make_clusters", "groups words for a hierarchical or adaptive softmax"),
}


def main(name: str | None = None) -> None:
    """Runs the command `name`, or that of the first argument, with the other arguments."""
    # jaxlib reads this when it is loaded: XLA would also log the errors that it raises
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if name is None and (len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help", "help")):
        width = max(map(len, COMMANDS))
        lines = [f"    {key:{width}}  {about}" for key, (_, about) in COMMANDS.items()]
        print("\n".join([__doc__.strip(), "", *lines]))
        return
    from adaptive_jax.errors import InputError, MissingPackage, check_known

    try:
        from adaptive_jax.config import commands
    except MissingPackage as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

    if name is None:
        name = sys.argv.pop(1)
        try:
            check_known(f"command {name!r}", name, COMMANDS)
        except InputError as error:
            commands.fail(error)
        sys.argv[0] = f"python -m adaptive_jax {name}"
    if os.getcwd() not in sys.path:  # as with `python -m`: a config may name classes in it
        sys.path.append(os.getcwd())
    commands.run_module(f"adaptive_jax.{COMMANDS[name][0]}")


if __name__ == "__main__":
    main()
