"""Outputs on one device and on eight: the same loss and gradients, whatever the
microbatches and axes.
"""

import json

PROGRAM = """
import json, pathlib, sys
import jax, jax.numpy as jnp, numpy as np
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.data.vocabulary.lexicon import lexicon
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.parallel import sharding
from adaptive_jax.model.gradients import make_gradients
from adaptive_jax.inputs.groc import GroC
from adaptive_jax.model.language_model import build, parameter_shapes
from tests.toys import NoBody, random_params

words = Vocabulary.build({f"w{n}": 100 // n for n in range(1, 57)} | {"<eos>": 99})
cut = {"name": "own", "cutoffs": (11, 30), "factor": 2, "width": 4, "bias": True}
one = {"name": "own", "bias": True}
mapped = {"name": "mapped", "dropout": 0.3, "layer_dropout": 0.2}
letters = {"width": 2, "filters": ((1, 4),), "highway_layers": 0, "length": 5}
composed = {"name": "composed", "correction": 2, "bias": "predicted", "cnn": letters}
OUTPUTS = {
    "hierarchical": {"name": "hierarchical", "table": cut},
    "sampled": {"name": "sampled", "table": one, "samples": 9, "proposal": "unigram"},
    "nce": {"name": "nce", "table": one, "samples": 9},
    "differentiated": {"name": "differentiated", "table": cut | {"projected": False}},
    "mapped": {"name": "softmax", "table": mapped},
    "composed": {"name": "softmax", "table": composed},
    "groc": {
        "name": "softmax",
        "table": {"name": "mapped", "depth": 0, "dropout": 0.3, "bias": "predicted"},
    },
}
lines = [
    {
        "word": f"w{n}",
        "relations": [f"w{n // 2 + 1}", f"w{n}"],
        "definition": ["w1", "w2", f"w{n + 1}"],
    }
    for n in range(2, 50)
]
pathlib.Path(sys.argv[1]).write_text("".join(json.dumps(line) + "\\n" for line in lines))
INPUTS = {"groc": letters | {"name": "groc", "lexicon": sys.argv[1], "strides": (1,)}}
ids = np.random.default_rng(0).integers(0, len(words), (16, 4)).astype(np.int32)
batch = Batch(
    ids[:, :-1],
    ids[:, 1:],
    np.random.default_rng(1).random((16, 3), "f"),
    np.arange(16, dtype=np.int32),
)

models = {
    name: build(
        {
            "dtype": "float32",
            "shard_words": False,
            "input": INPUTS.get(name, {"name": "lookup"}),
            "output": output,
            "body": {"name": "gated_conv", "features": 8, "blocks": ((1, 1, 8),)},
        },
        len(words),
    ).clone(body=NoBody())
    for name, output in OUTPUTS.items()
}
params = {name: random_params(parameter_shapes(model)) for name, model in models.items()}

read, surfaces = [], GroC._surfaces
GroC._surfaces = lambda self, words: (read.append(len(words)), surfaces(self, words))[1]

def results(devices, parts):
    mesh = sharding.device_mesh(1, jax.devices()[:devices])
    def gradients(model, params, batch):
        return make_gradients(model, mesh, 7)(
            params, lexicon(words, model.lexicon_spec()), jnp.zeros((), jnp.int32), batch, (), {}
        )
    def all_outputs(params, batch):
        return {name: gradients(model, params[name], batch) for name, model in models.items()}
    cut = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), batch)
    put = jax.device_put(params, sharding.replicated(mesh)), sharding.put_batch(mesh, cut, axis=1)
    return jax.tree.map(np.asarray, jax.jit(all_outputs)(*put))

alone, whole = results(1, 1), len(read)
eight = results(8, 2)
GroC._surfaces = surfaces
made = {"read": [sorted(set(read[:whole])), sorted(set(read[whole:]))]}
print(
    json.dumps(
        made
        | {
            name: {
                "loss": [float(alone[name][2].loss), float(eight[name][2].loss)],
                "nll": [float(alone[name][2].nll), float(eight[name][2].nll)],
                "apart": float(np.max([  # `max` would drop NaN
                    np.abs(a - b).max()
                    for a, b in zip(*map(jax.tree.leaves, (alone[name][0], eight[name][0])))
                ])),
                "norm": float(sum(np.sum(a**2) for a in jax.tree.leaves(alone[name][0]))) ** 0.5,
            }
            for name in OUTPUTS
        }
    )
)
"""


def test_outputs_on_eight_devices(eight, tmp_path):
    """Two microbatches on each of 8 devices: candidates and masks are those of one device.

    Of 57 words, each of 8 devices reads the letters of 8, though every word's relations and
    definition are words of any device.
    """
    results = json.loads(eight(PROGRAM, tmp_path / "lexicon.jsonl"))
    assert results.pop("read") == [[57], [8]]
    for name, result in results.items():
        for key in ("loss", "nll"):
            one, other = result[key]
            assert abs(one - other) < 1e-5 * one, (name, key, result)
        # Sums in another order: a few roundings of the largest gradients.
        assert result["norm"] > 0.1 and result["apart"] < 3e-7 * result["norm"], (name, result)


MESHES = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
from adaptive_jax.inputs.lookup import Lookup
from adaptive_jax.outputs.differentiated import Differentiated
from adaptive_jax.outputs.sampled import NCE, Sampled
from adaptive_jax.outputs.tables import OwnTable
key = jax.random.key(0)
hidden, targets = jax.random.normal(key, (8, 6, 8)), jax.random.randint(key, (8, 6), 0, 40)
weights = jnp.ones((8, 6)).at[0, 0].set(0)
look_up = Lookup(40, 8, width=4)
of_words = look_up.init(key, targets)
bands = OwnTable(40, 8, cutoffs=(10, 20), factor=2, width=8, bias=True)
for layer in Sampled(OwnTable(40, 8), 16), NCE(OwnTable(40, 8), 16), Differentiated(bands):
    def loss(params, *tokens, train=True):
        given = {"params": params}, *tokens
        return layer.apply(*given, train=train, method="loss", rngs={"dropout": key}).total
    given = hidden, targets, weights
    params = layer.init({"params": key, "dropout": key}, *given, method="loss")["params"]
    slopes = jax.jit(jax.value_and_grad(loss, (0, 1, 3)))
    right = jax.device_get(slopes(params, *given))
    for kind in AxisType.Explicit, AxisType.Auto:
        with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), (kind,) * 2)):
            tokens = jax.device_put(given, P(("data", "model")))
            whole = jax.device_put(params, P())
            assert "all-gather" not in slopes.lower(whole, *tokens).compile().as_text(), layer
            even = lambda a: a.ndim == 2 and len(a) % 2 == 0
            cut = lambda a: jax.device_put(a, P("model" if even(a) else None))
            found = jax.device_get(slopes(jax.tree.map(cut, params), *tokens))
            log_probs = layer.apply({"params": params}, tokens[0], method="log_probs")
            vectors = jax.jit(look_up.apply)(jax.device_put(of_words, P()), tokens[1])
        assert log_probs.shape == (8, 6, 40)
        assert jnp.allclose(jax.device_get(vectors), look_up.apply(of_words, targets))
        for one, other in zip(*map(jax.tree.leaves, (found, right))):
            assert jnp.allclose(one, other, rtol=1e-5, atol=1e-5), (layer, kind)
"""


def test_sampled_and_differentiated_outputs_on_meshes(eight):
    """Each device computes its own tokens: JAX refused Explicit axes, and on Auto axes hidden
    states of all tokens were gathered. So it refused `Lookup`.
    """
    eight(MESHES)


EXPLICIT = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from adaptive_jax import AdaptiveInput, AdaptiveSoftmax, OwnTable

found = {}
hidden = np.random.default_rng(0).standard_normal((16, 4)).astype("f")
targets = np.arange(16) % 12
far = lambda a, b: float(jnp.abs(a - b).max())
explicit = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
put = lambda array, *spec: jax.device_put(array, NamedSharding(explicit, P(*spec)))
model = AdaptiveSoftmax(OwnTable(12, 4, (5,), bias=True), input_dropout=0.5)
params = model.init(jax.random.key(0), hidden, method="log_probs")
log_probs = jax.jit(lambda p, h: model.apply(p, h, method="log_probs"))
found["features"] = far(log_probs(params, put(hidden, "data", "model")), log_probs(params, hidden))
words = AdaptiveInput(36, 4, tuple(range(9, 36, 9)), factor=1)
given = words.init(jax.random.key(0), np.arange(36))
cut = jax.tree.map(lambda a: put(a, "model") if len(a) % 2 == 0 and a.ndim > 1 else put(a), given)
vectors = jax.jit(words.apply)
found["uneven bands"] = far(vectors(cut, put(np.arange(36), "data")), vectors(given, np.arange(36)))
drawn = jax.jit(lambda h, y, i: model.apply(
    params, h, y, None, i, train=True, rngs={"dropout": jax.random.key(1)}, method="loss").total)
rows = hidden.reshape(8, 2, 4), targets.reshape(8, 2), np.arange(8)
found["rows"] = far(drawn(*(put(a, "data") for a in rows)), drawn(*rows)) / 100
print(json.dumps(found))
"""


def test_layers_on_explicit_axes(eight):
    """Features that are cut, bands that an axis does not divide, and numbers of rows, from which
    dropout is drawn: JAX asks there how every product is to be cut.
    """
    assert {name: far for name, far in json.loads(eight(EXPLICIT)).items() if not far < 1e-6} == {}
