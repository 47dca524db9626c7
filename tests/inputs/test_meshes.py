"""AdaptiveInput and AdaptiveSoftmax in programs that put arrays on meshes of their own."""

import json

PROGRAM = """
import json
import jax, jax.numpy as jnp, numpy as np
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec as P
from adaptive_jax import AdaptiveInput, AdaptiveSoftmax, TiedTable
from adaptive_jax.inputs.lookup import Lookup
from tests.losses.shardings import apart, arrange

normal = nn.initializers.normal(0.3)

class Model(nn.Module):
    def setup(self):
        self.embed = AdaptiveInput(
            40, 12, (8, 16), 2, word_dropout=0.3,
            table_init=nn.with_partitioning(normal, ("words", None)),
            projection_init=nn.with_partitioning(normal, (None, "width")),
        )
        self.output = AdaptiveSoftmax(TiedTable(self.embed, 12), tail_dropout=0.3)

    def __call__(self, words, targets):
        return self.output.loss(jnp.tanh(self.embed(words, train=True)), targets, train=True).total

words, targets = np.random.default_rng(0).integers(0, 40, (2, 8, 6)).astype(np.int32)
keys = {name: jax.random.key(n) for n, name in enumerate(("params", "dropout"))}
boxed = jax.jit(Model().init)(keys, words, targets)
params, found = nn.meta.unbox(boxed), {}

def loss(params, words, targets):
    return Model().apply(params, words, targets, rngs={"dropout": keys["dropout"]})

def answers(params, words):
    def predicted(model, words):
        hidden = jnp.tanh(model.embed(words))
        return model.output.predict(hidden), model.output.log_probs(hidden)
    return Model().apply(params, words, method=predicted)

step = jax.jit(jax.value_and_grad(loss))
want = jax.tree.map(np.asarray, step(params, words, targets))
best, probs = map(np.asarray, jax.jit(answers)(params, words))
few = words[:2, :2], targets[:2, :2]
want_few = jax.tree.map(np.asarray, step(params, *few))
for kind, devices, tokens, spec in (
    ("Explicit", "1", "data", P()),
    ("Explicit", "2 x 2", "data and model", P(None, "model")),
    ("Explicit", "2 x 2", "data", P("model")),
    ("Auto", "2 x 2", "data and model", P("model")),
):
    mesh, (hidden, *_) = arrange(kind, devices, tokens, "replicated")
    on = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))
    placed = jax.tree.map(
        lambda a: on(a, spec if a.ndim == 2 and not (a.shape[0] % 2 or a.shape[1] % 2) else P()),
        params,
    )
    ids = [on(a, P(*hidden.sharding.spec)) for a in (words, targets)]
    with jax.set_mesh(mesh):
        cell = f"{kind}, {devices}, {tokens}"
        found[cell] = apart(step(placed, *ids), want)
        here, log_probs = jax.jit(answers)(placed, ids[0])
        assert (here == best).all()
        found[f"{cell}, log_probs"] = apart(log_probs, probs)
        if tokens == "data and model":  # fewer numbers than tables: these stay cut
            few = [on(np.asarray(a), P(*hidden.sharding.spec)) for a in few]
            found[f"{cell}, few tokens"] = apart(step(placed, *few), want_few)
        if devices == "1":
            found["eager"] = apart(loss(placed, *ids), want[0])
narrow = Lookup(40, 6, width=4)
given = narrow.init(keys["params"], words)
slopes = jax.jit(jax.grad(lambda params, words: jnp.sum(narrow.apply(params, words) ** 2)))
want = jax.tree.map(np.asarray, slopes(given, words))
mesh, (hidden, *_) = arrange("Explicit", "2 x 2", "data", "replicated")
with jax.set_mesh(mesh):
    placed = jax.device_put(given, NamedSharding(mesh, P())), jax.device_put(words, hidden.sharding)
    found["a narrow Lookup"] = apart(slopes(*placed), want)
specs = nn.get_partition_spec(boxed)["params"]["embed"]
print(json.dumps([found, [*specs["table_1"]], [*specs["projection_1"]]]))
"""


def test_layers_on_meshes(eight):
    """Loss, gradients, log-probabilities and most probable words of a tied model, with its dropout,
    are those of one device. Without it, look-ups on Explicit axes end in an error of JAX, which
    asks for out_sharding.

    Parameters get the names of axes that flax's own layers take.
    """
    errors, table, projection = json.loads(eight(PROGRAM))
    assert len(errors) == 12 and {cell: far for cell, far in errors.items() if not far < 1e-6} == {}
    assert (table, projection) == (["words", None], [None, "width"])
