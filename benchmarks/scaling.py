"""On paper: what an update costs on 8, 64 and 512 accelerators, in arithmetic and in communication.

    python -m benchmarks.scaling

Counted, not measured. Arithmetic is the plan's matrix work at half of the makers' peak. Gradients cross devices once an update, in
float32, after the last backward pass: nothing of it is hidden behind arithmetic. A sum over n devices sends and receives each
device's share twice, 2 · bytes · (n − 1) / n at the bandwidth below, which is what a device has to all the others taken
together when all of them talk. Parameters cut over 8 devices are gathered in both passes of every batch and their gradients
scattered: 3 · bytes · 7/8; the sum over the other devices is then of an eighth of the bytes on each.
"""

from absl import app

from adaptive_jax.devices.accelerators import ACCELERATORS
from adaptive_jax.plans.costs import plan
from configs import billion_word, wikitext103

EFFICIENCY = 0.5  # of the peak, in arithmetic
NEAR = 8  # devices of a machine, or of a TPU's neighbourhood
# Bytes a second of a device to its neighbours, and of each to all when more than NEAR take part: NVLink within a machine and
# a 400 Gb/s port for each GPU, used by eight at once for parts of one sum; a TPU's torus of two or three axes.
LINKS = {"H200": (450e9, 400e9), "TPU v5 lite": (180e9, 180e9), "TPU v5": (540e9, 540e9)}
COUNTS = (8, 64, 512)


def costs(config: dict, name: str, devices: int, fsdp: int) -> dict:
    """Seconds of arithmetic and of communication of an update on so many devices, and the tokens that each has of it."""
    numbers = plan(config | {"fsdp": fsdp}, config["data"]["vocabulary_size"], 8)
    work = numbers["flops_per_token"]["training"] * config["tokens_per_update"]
    parameters = 4 * numbers["parameters"]["total"]
    near, far = LINKS[name]

    def summed(size, count, bandwidth):
        return 2 * size * (count - 1) / count / bandwidth

    tokens = config["tokens_per_update"] / devices
    batches = max(1, round(tokens / config["tokens_per_device"]))
    if fsdp > 1:
        gathered = 3 * batches * parameters * (fsdp - 1) / fsdp / near
        # All devices of a group send their eighth at the same time, through the same machine's ports.
        communication = gathered + summed(parameters, devices // fsdp, far)
    else:
        communication = summed(parameters, devices, near if devices <= NEAR else far)
    return {
        "tokens": tokens,
        "arithmetic": work / devices / EFFICIENCY / ACCELERATORS[name].flops,
        "communication": communication,
    }


def main(argv):
    """Prints a table."""
    del argv
    rows = {"wikitext103:adp_t": (wikitext103, "adp_t", 1), "billion_word:very_large, cut over 8": (billion_word, "very_large", 8)}
    print("| config | accelerator | devices | tokens on each | arithmetic, ms | communication, ms | share of arithmetic |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for label, (module, row, fsdp) in rows.items():
        config = module.get_config(row).to_dict()
        for name in LINKS:
            for devices in COUNTS:
                cost = costs(config, name, devices, fsdp)
                arithmetic, communication = cost["arithmetic"], cost["communication"]
                print(
                    f"| `{label}` | {name} | {devices} | {cost['tokens']:,.0f} | {1e3 * arithmetic:,.1f} | "
                    f"{1e3 * communication:,.1f} | {arithmetic / (arithmetic + communication):.0%} |"
                )


if __name__ == "__main__":
    app.run(main)
