"""Compiled losses on meshes can be saved, exported and cached; the layouts of large trainers gather
no table.
"""

import json

import pytest

SAVED = """
import json, os, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import serialize_executable
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from adaptive_jax import linear_cross_entropy
from tests.programs import uncached
rng = np.random.default_rng(0)
arrays = [rng.standard_normal(s).astype("f") for s in ((16, 8), (64, 8))] + [np.arange(16)]
right = jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1)))(*arrays))
tokens, apart = P(("data", "fsdp")), {}
for kind in AxisType.Auto, AxisType.Explicit:
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(kind,) * 2)
    every = P(), P("fsdp"), P(None, "fsdp"), P(("data", "fsdp"))
    for spec in (P("fsdp"),) if kind == AxisType.Auto else every:
        specs = tokens, spec, tokens
        loss = linear_cross_entropy
        if kind == AxisType.Auto:
            loss = jax.sharding.explicit_axes(loss, axes=("data", "fsdp"), in_sharding=specs)
        placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs)]
        with jax.set_mesh(mesh), uncached():
            program = jax.jit(jax.value_and_grad(lambda *a: loss(*a), (0, 1)))
            compiled = program.lower(*placed).compile()
            payload = serialize_executable.serialize(compiled)
            exported = jax.export.export(program)(*placed)
            again = serialize_executable.deserialize_and_load(*payload)
            results = compiled(*placed), again(*placed), exported.call(*placed)
        far = [
            np.abs(np.asarray(a) - b).max()
            for result in results
            for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(right), strict=True)
        ]
        apart[f"{kind} {spec}"] = float(np.max(far))  # `max` would drop NaN
print(json.dumps(apart))
"""
CACHED = """
import json, os, sys
from collections import Counter
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from adaptive_jax import linear_cross_entropy
events = Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name]))
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
specs = P("data"), P(), P("data")
arrays = np.ones((8, 4), "f"), np.ones((20, 4), "f"), np.arange(8)
placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs)]
with jax.set_mesh(mesh):
    jax.jit(jax.grad(linear_cross_entropy)).lower(*placed).compile()
print(json.dumps([events["/jax/compilation_cache/cache_hits"],
                  events["/jax/compilation_cache/cache_misses"]]))
"""
LAYOUTS = """
import itertools, json, re
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from adaptive_jax import linear_cross_entropy
TOKENS, WIDTH, WORDS = 32, 16, 2_048
rng = np.random.default_rng(0)
arrays = [rng.standard_normal(s).astype("f") for s in ((TOKENS, WIDTH), (WORDS, WIDTH))]
arrays.append(rng.integers(0, WORDS, TOKENS))
step = jax.value_and_grad(linear_cross_entropy, (0, 1))
right, report = jax.tree.map(np.asarray, jax.jit(step)(*arrays)), {}
LAYOUTS = {  # mesh, tokens, table
    "an axis of size 1": (dict(fsdp=8, tensor=1), P("fsdp"), P("tensor", "fsdp")),
    "width beside another axis": (dict(data=2, fsdp=4), P(("data", "fsdp")), P(None, "fsdp")),
    "replicas": (dict(replica=2, data=4), P(("replica", "data")), P(None, "data")),
    "words over two axes": (dict(fsdp=4, expert=2), P(("fsdp", "expert")), P(("fsdp", "expert"))),
    "width over two axes": (dict(fsdp=4, context=2), P(("fsdp", "context")),
                            P(None, ("fsdp", "context"))),
}
for name, (axes, tokens, table) in LAYOUTS.items():
    for kind in AxisType.Auto, AxisType.Explicit:
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))
        specs = tokens, table, tokens
        placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs)]
        shardings = None, (placed[0].sharding, placed[1].sharding)
        program = jax.jit(step, out_shardings=shardings).lower(*placed).compile()
        text = program.as_text()
        pairs = zip(jax.tree.leaves(program(*placed)), jax.tree.leaves(right), strict=True)
        apart = float(np.max([np.abs(np.asarray(a) - b).max() for a, b in pairs]))
        whole = re.findall(rf"f32\\[(?:{WORDS},{WIDTH}|{WIDTH},{WORDS})\\]", text)
        report[f"{name}, {kind.name}"] = [apart, len(whole)]
print(json.dumps(report))
"""


def run(eight, code, *arguments):
    return json.loads(eight(code, *arguments))


def test_programs_are_saved_and_exported(eight):
    """On Explicit axes, with the same gradients for tables replicated, sharded by words, by width
    and over two axes; on Auto axes through `jax.sharding.explicit_axes`, whose program is the
    Explicit one, by words alone. Without it no trainer can save its compiled step.
    """
    apart = run(eight, SAVED)
    assert len(apart) == 5 and all(far < 2e-6 for far in apart.values()), apart


def test_a_second_process_hits_the_cache(fresh_python, tmp_path):
    """On Explicit axes the name of the program held an address, so every restart compiled anew."""
    first, second = (fresh_python(CACHED, tmp_path) for _ in range(2))
    assert first[0] == 0 < first[1] and second[0] == first[1] and second[1] == 0, (first, second)


def test_layouts_of_large_trainers(eight):
    """No device holds the whole table or its gradient: axes of size 1, tables sharded by width
    beside a further axis, and tables over two axes were gathered in float32.
    """
    report = run(eight, LAYOUTS)
    assert len(report) == 10 and all(apart < 2e-6 for apart, _ in report.values()), report
    assert {name: count for name, (_, count) in report.items() if count} == {}


@pytest.fixture
def fresh_python():
    """Runs a program in a process of its own with 4 devices; its last line as JSON."""
    import os
    import subprocess
    import sys

    def start(code, *arguments):
        environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
        command = [sys.executable, "-c", code, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return start
