"""How the compiler treats programs of tests that run once or twice: in haste."""

import jax

HASTE = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # later versions have no other way to compile fused loops; here it halves the time
    HASTE["xla_cpu_use_fusion_emitters"] = False
