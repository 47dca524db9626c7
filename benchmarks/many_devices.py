r"""Memory, collectives and predicted time of an update on several devices that need not be here.

    python -m benchmarks.many_devices --config=configs/wikitext103.py:adp_t --target=h100:8
    python -m benchmarks.many_devices --config=configs/billion_word.py:large --config.fsdp=8 \
        --target=h100:8 --option=xla_gpu_enable_latency_hiding_scheduler=True

An update of the config's own `tokens_per_update` is compiled. Two streams are simulated in the
order of the compiler's schedule: kernels, each of the time that `benchmarks.roofline` predicts, and
collectives, each of its bytes over the link (`LINKS`), from its start to its end. Nothing is timed.

- `kernels`: time of the kernels alone; `collectives`: of the collectives alone; `exposed`: time
  that kernels wait for collectives.
- `share of peak`: model FLOPs over those of the data sheet in the predicted time.
- `by formula`: the same for 1 to 64 devices with as many tokens each, see `scaled`.

Launches and the memory bandwidth that collectives use are left out.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.config import flags as config_flags
from adaptive_jax.errors import InputError
from adaptive_jax.numerics.devices import DEVICES
from adaptive_jax.planning.plan import make_plan
from adaptive_jax.planning.targets import topology
from adaptive_jax.training.compiled import compile_update, memory_of
from adaptive_jax.training.sparse import parts_of
from benchmarks import roofline
from benchmarks.collectives import CALLERS, COLLECTIVES, Program, exchanged, trips


class Link(NamedTuple):
    """Bytes per second that a device sends, and at the same time receives."""

    inside: float  # among the devices of a host, or of a slice of TPUs
    outside: float  # to other hosts
    devices: int  # that `inside` joins


# Four fifths of the data sheets', assumed. H100: NVLink 4, 450 GB/s a direction, and a port of
# 400 Gb/s a GPU. v5e: 2 of 4 links of 50 GB/s a direction, as a grid of 4 x 4 has no wraparound.
LINKS = {"h100": Link(0.8 * 450e9, 0.8 * 50e9, 8), "v5e": Link(0.8 * 100e9, 0.8 * 100e9, 256)}


class Exchange(NamedTuple):
    """A collective of a program, once for each time it runs."""

    kind: str
    bytes: int
    seconds: float
    exposed: float  # seconds that kernels wait for it


def seconds_on_link(kind: str, size: float, devices: int, link: Link) -> float:
    """Time of one collective of `size` bytes: a ring inside, then one over the hosts, in which each
    device has its share of the bytes.
    """
    rounds = 2 if kind == "all-reduce" else 1
    inside = min(devices, link.devices)
    hosts = devices // inside
    ring = (inside - 1) / inside * size / link.inside
    return rounds * (ring + (hosts - 1) / hosts * size / inside / link.outside)


class Schedule:
    """The streams of kernels and of collectives, each as far as it has run.

    Attributes:
        clock: seconds until the last kernel so far ends.
        kernels: seconds of the kernels alone.
        exchanges: collectives that have ended, in order.
    """

    def __init__(self, text: str, rates: roofline.Rates, devices: int, link: Link):
        self.program = Program(text)
        self.seconds = {
            kernel.instruction.name: kernel.seconds(rates) / kernel.times
            for kernel in roofline.kernels(text)
        }
        self.devices, self.link = devices, link
        self.clock = self.kernels = self.free = 0.0  # free: the link has ended its collectives
        self.ends, self.exchanges = {}, []
        self._run(self.program.entry)

    def _run(self, computation):
        for one in self.program.computations[computation]:
            kind = one.opcode.removesuffix("-start").removesuffix("-done")
            if kind in COLLECTIVES:
                if not one.opcode.endswith("-done"):
                    self._start(kind, one)
                if not one.opcode.endswith("-start"):
                    self._wait(kind, one.inputs[0] if one.opcode.endswith("-done") else one.name)
            elif one.opcode in CALLERS:
                for _ in range(trips(one, self.program.computations)):
                    for called in one.called:
                        self._run(called)
            else:
                self.clock += self.seconds.get(one.name, 0.0)
                self.kernels += self.seconds.get(one.name, 0.0)

    def _start(self, kind, one):
        size = exchanged(one, self.program)
        seconds = seconds_on_link(kind, size, self.devices, self.link)
        self.free = max(self.free, self.clock) + seconds
        self.ends[one.name] = size, seconds, self.free

    def _wait(self, kind, name):
        size, seconds, end = self.ends[name]
        exposed = max(0.0, end - self.clock)
        self.clock += exposed
        self.exchanges.append(Exchange(kind, size, seconds, exposed))


def by_kind(exchanges: list[Exchange]) -> Iterator[str]:
    """Rows of a table: collectives by kind and size."""
    sizes = Counter((one.kind, f"{one.bytes / 1e6:.1f}") for one in exchanges)
    for (kind, megabytes), count in sorted(sizes.items(), key=lambda item: -float(item[0][1])):
        yield f"| {kind} | {count} x {megabytes} MB |"


def scaled(schedule: Schedule, devices: int) -> float:
    """Predicted seconds of an update on another number of devices, with as many tokens on each:
    kernels take what they took, and of the collectives the same share is exposed.
    """
    waits = 0.0
    for one in schedule.exchanges:
        seconds = seconds_on_link(one.kind, one.bytes, devices, schedule.link)
        waits += seconds * one.exposed / one.seconds if one.seconds else 0.0
    return schedule.kernels + waits


def main(settings) -> None:
    """Prints the counts; writes the program's text."""
    target = topology(settings.target)
    kind, devices = settings.target.partition(":")[0], len(target.devices)
    config = config_flags.config()[0]
    if kind not in LINKS:
        raise InputError(f"--target must be of {', '.join(LINKS)}, got {settings.target}")
    if config["fsdp"] not in (1, devices):
        raise InputError(f"fsdp must be 1 or {devices}, got {config['fsdp']}")
    if not config["tokens_per_device"]:
        config = config | {"tokens_per_device": config["tokens_per_update"] // devices}
    parts = parts_of(config, config["data"]["vocabulary_size"])
    plan = make_plan(config, parts, devices, target.memory, 1)
    options = {}
    for option in settings.option:
        name, equals, value = option.partition("=")
        if not equals:
            raise InputError(f"--option={option} must be NAME=VALUE")
        try:
            options[name] = ast.literal_eval({"true": "True", "false": "False"}.get(value, value))
        except (ValueError, SyntaxError):
            options[name] = value
    compiled = compile_update(config, plan, parts, target.devices, target.options | options)
    text, memory = compiled.as_text(), memory_of(compiled)
    if settings.text:
        Path(settings.text).write_text(text)
    schedule = Schedule(text, roofline.rates_of(settings.target), devices, LINKS[kind])
    flops = plan.flops_per_token * plan.tokens_per_update
    peak = flops / (plan.devices * DEVICES[kind].flops * schedule.clock)
    exposed = sum(one.exposed for one in schedule.exchanges)
    tokens = plan.rows_per_device * plan.tokens_per_update // plan.rows_per_update
    print(
        f"| {settings.target}, fsdp {plan.fsdp}, {plan.accumulation} x {tokens:,}"
        f" tokens a device | counted |\n|---|---:|\n"
        f"| state | {memory.state / 1e9:.2f} GB |\n"
        f"| temporary | {memory.temporary / 1e9:.2f} GB |\n"
        f"| kernels | {1e3 * schedule.kernels:.1f} ms |\n"
        f"| collectives | {1e3 * sum(one.seconds for one in schedule.exchanges):.1f} ms |\n"
        f"| exposed | {1e3 * exposed:.1f} ms |\n"
        f"| an update | {1e3 * schedule.clock:.1f} ms |\n"
        f"| share of peak | {peak:.0%} |"
    )
    print("\n".join(by_kind(schedule.exchanges)))
    for count in (1, 2, 4, 8, 16, 32, 64):
        seconds = scaled(schedule, count)
        print(f"| by formula, {count} | {1e3 * seconds:.1f} ms, {schedule.kernels / seconds:.0%} |")


if __name__ == "__main__":
    config_flags.define("Config file and row")
    flags.DEFINE_string("target", "h100:8", "The devices, as --target of train.py.")
    flags.DEFINE_list("option", [], "Options of the compiler, as NAME=VALUE.")
    flags.DEFINE_string("text", None, "File for the compiled program, to read.")
    commands.run(lambda: main(flags.FLAGS))
