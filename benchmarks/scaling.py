"""On paper: what an update costs on 8, 64 and 512 accelerators, in arithmetic and in communication.

    python -m benchmarks.scaling

Computed, not measured. Arithmetic is the plan's matrix work at half of the vendors' peak. Gradients
cross devices once an update, in float32, after the last backward pass; none of it overlaps with
arithmetic. In a sum over n devices each one sends and receives 2 · bytes · (n − 1) / n, at the
bandwidth below: that of a device to all others when all communicate. Parameters sharded over 8
devices are gathered in both passes of every microbatch and their gradients scattered, 3 · bytes ·
7/8; the sum over the other devices is then of an eighth of the bytes on each. Everything counts as
float32; matrices of blocks that are gathered in bfloat16 take half.
"""

from adaptive_jax.config import commands
from adaptive_jax.config.keys import resolve
from adaptive_jax.numerics.devices import DEVICES
from adaptive_jax.planning.plan import make_plan
from configs import billion_word, wikitext103

EFFICIENCY = 0.5  # of the peak, in arithmetic
NEAR = 8  # devices of a machine, or of a TPU's neighbourhood
# Bytes per second of a device: to its neighbours; and to all, if more than NEAR take part. NVLink
# within a machine and a 400 Gb/s port for each GPU, with eight ports used at once for parts of one
# sum; a TPU's torus of two or three axes.
LINKS = {"h200": (450e9, 400e9), "v5e": (180e9, 180e9), "v5p": (540e9, 540e9)}
# Tokens that a device holds at a time, of the larger model.
HELD = {"h200": 16_384, "v5e": 2_048, "v5p": 16_384}
COUNTS = (8, 64, 512)


def costs(config: dict, name: str, devices: int, fsdp: int) -> dict:
    """An update on `devices` accelerators: seconds of `arithmetic` and of `communication`, and
    `tokens` for each device.
    """
    plan = make_plan(
        config | {"fsdp": fsdp, "tokens_per_device": HELD[name]},
        config["data"]["vocabulary_size"],
        8,
        int(DEVICES[name].memory),
    )
    work = plan.flops_per_token * plan.tokens_per_update
    parameters = 4 * plan.parameters["total"]
    near, far = LINKS[name]

    def summed(size, count, bandwidth):
        return 2 * size * (count - 1) / count / bandwidth

    tokens = plan.tokens_per_update / devices
    microbatches = max(1, round(tokens / plan.tokens_per_device))
    if fsdp > 1:
        gathered = 3 * microbatches * parameters * (fsdp - 1) / fsdp / near
        # All devices of a group send their eighth at the same time, through the same machine's
        # ports.
        communication = gathered + summed(parameters, devices // fsdp, far)
    else:
        communication = summed(parameters, devices, near if devices <= NEAR else far)
    arithmetic = work / devices / EFFICIENCY / DEVICES[name].flops
    return {"tokens": tokens, "arithmetic": arithmetic, "communication": communication}


def main():
    """Prints a table."""
    rows = {"wikitext103:adp_t": (wikitext103, "adp_t", 1)}
    rows["billion_word:very_large, sharded over 8"] = billion_word, "very_large", 8
    print(
        "| config | accelerator | devices | tokens on each | arithmetic, ms | communication, ms |"
        " share of arithmetic |"
    )
    print("|---|---|---:|---:|---:|---:|---:|")
    for label, (module, row, fsdp) in rows.items():
        config = resolve(module.get_config(row))
        for name in LINKS:
            for devices in COUNTS:
                tokens, arithmetic, communication = costs(config, name, devices, fsdp).values()
                share = arithmetic / (arithmetic + communication)
                times = f"{1e3 * arithmetic:,.1f} | {1e3 * communication:,.1f} | {share:.0%}"
                print(f"| `{label}` | {name} | {devices} | {tokens:,.0f} | {times} |")


if __name__ == "__main__":
    commands.run(main)
