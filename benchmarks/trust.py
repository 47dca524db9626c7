"""Who passes `adaptive_jax.testing.check_cross_entropy`: the losses of other packages and this one.

    JAX_NUM_CPU_DEVICES=8 python -m benchmarks.trust [--skip=PEER,...] [--json=FILE]

It prints a table in Markdown, a row for each case: `yes`, the relative errors of loss and gradient
in a case that failed, or `-` where the function has no such argument; below it, what each failure
says. Peers are those of `benchmarks.full_softmax` for JAX, and torch, whose loss and gradients a
callback computes. Packages that are not installed are passed over.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.errors import check_known
from adaptive_jax.testing import CASES, Result, check_cross_entropy
from benchmarks import full_softmax
from benchmarks.timing import machine, write_json


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def torch_loss(hidden, table, targets, ignore_index=-100):
    """torch's cross_entropy, with the gradients of torch."""
    return _with_gradients(hidden, table, targets, ignore_index)[0]


def _with_gradients(hidden, table, targets, ignore_index):
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (hidden, table)]
    shapes = jax.ShapeDtypeStruct((), jnp.float32), shapes
    call = functools.partial(_in_torch, ignore_index)
    return jax.pure_callback(call, shapes, hidden, table, targets)


def _in_torch(ignore_index, *arrays):
    import torch

    hidden, table, targets = map(np.asarray, arrays)
    dtype = getattr(torch, hidden.dtype.name)
    leaves = [torch.tensor(np.float32(a)).to(dtype).requires_grad_() for a in (hidden, table)]
    logits = leaves[0] @ leaves[1].T
    targets = torch.tensor(targets, dtype=torch.long)
    loss = torch.nn.functional.cross_entropy(logits.float(), targets, ignore_index=ignore_index)
    gradients = torch.autograd.grad(loss, leaves)
    return np.float32(loss.item()), [a.float().numpy().astype(hidden.dtype) for a in gradients]


def _backward(ignore_index, gradients, pull):
    return *((pull * a).astype(a.dtype) for a in gradients), None


torch_loss.defvjp(_with_gradients, _backward)

PEERS = {**full_softmax.JAX, "torch": torch_loss}
PACKAGES = {
    "jax-cce": "jax_cce",
    "tokamax": "tokamax",
    "tokamax chunked": "tokamax",
    "torch": "torch",
}


def results(name: str) -> dict[str, Result]:
    """The results of a peer by case. torch is not run over devices of JAX."""
    of_cases = check_cross_entropy(PEERS[name], raises=False)
    return {r.case: r for r in of_cases if not (name == "torch" and CASES[r.case].specs)}


def cell(result: Result | None) -> str:
    """A cell of the table."""
    if result is None or result.passed is None:
        return "-"
    if result.passed:
        return "yes"
    if np.isnan(result.errors).any():
        return "NaN" if result.note.startswith("loss") else "error"
    return "{:.0e}, {:.0e}".format(*result.errors)


def main(settings):
    """Prints the table and what failures say."""
    for name in settings.skip:
        check_known(f"--skip={name}", name, PEERS)
    by_program = {}
    for name in [name for name in PEERS if name not in settings.skip]:
        if importlib.util.find_spec(PACKAGES.get(name, "jax")) is None:
            print(f"{name} is passed over: it is not installed", flush=True)
            continue
        by_program[name] = results(name)
    print(f"{machine()}, devices: {jax.device_count()}\n")
    print(f"| case | {' | '.join(by_program)} |\n|---|{'---|' * len(by_program)}")
    for case in CASES:
        print(
            f"| {case} | {' | '.join(cell(by_case.get(case)) for by_case in by_program.values())} |"
        )
    for name, by_case in by_program.items():
        for result in by_case.values():
            if result.passed is False:
                print(f"\n{name}, {result.case}: {result.note}")
    write_json(
        settings.json, {name: list(by_case.values()) for name, by_case in by_program.items()}
    )


if __name__ == "__main__":
    flags.DEFINE_list("skip", [], "Peers to leave out.")
    flags.DEFINE_string("json", None, "File for the results.")
    commands.run(lambda: main(flags.FLAGS))
