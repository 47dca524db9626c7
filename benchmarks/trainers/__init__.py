"""Language models of other trainers with their own loss, and with linear_cross_entropy in its
place. Only `benchmarks.adoption` imports these modules, once a checkout is on the path.

Each has `LAYOUTS`, names of meshes and shardings, and
`programs(layout, words, devices)`: name of a loss to a compiled program that returns that loss and
the gradients of all parameters, and its arguments. The first is the trainer's own.
"""

ROWS = 16
OURS = "linear_cross_entropy"
