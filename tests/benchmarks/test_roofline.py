"""Counts and predicted times of compiled programs, against programs whose products are known."""

import jax
import jax.numpy as jnp

from benchmarks import roofline
from benchmarks.roofline import Kernel, Rates
from tests import refuses

# As XLA writes for a GPU and a TPU: a fusion with a product of 4 x 8 x 16 in a loop of 3 trips,
# a call of a library for 2 batches of 4 x 8 x 4, a convolution of 4 x 8 x 16,
# and one for 2 batches of 4 x 8 x 4, whose window has one entry between dilated inputs.
TEXT = """\
HloModule jit_step, is_scheduled=true

%fused_product (param_0.1: bf16[4,8], param_1.1: bf16[8,16]) -> bf16[4,16] {
  %param_0.1 = bf16[4,8]{1,0} parameter(0)
  %param_1.1 = bf16[8,16]{1,0} parameter(1)
  ROOT %dot.1 = bf16[4,16]{1,0} dot(%param_0.1, %param_1.1), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
}

%fused_convolution (param_0.2: bf16[4,8], param_1.2: bf16[8,16]) -> bf16[4,16] {
  %param_0.2 = bf16[4,8]{1,0} parameter(0)
  %param_1.2 = bf16[8,16]{1,0} parameter(1)
  ROOT %convolution.1 = bf16[4,16]{1,0} convolution(%param_0.2, %param_1.2), dim_labels=bf_io->bf
}

%body (state: (s32[], bf16[4,8], bf16[8,16])) -> (s32[], bf16[4,8], bf16[8,16]) {
  %state = (s32[], bf16[4,8]{1,0}, bf16[8,16]{1,0}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %left = bf16[4,8]{1,0} get-tuple-element(%state), index=1
  %right = bf16[8,16]{1,0} get-tuple-element(%state), index=2
  %product = bf16[4,16]{1,0} fusion(%left, %right), kind=kCustom, calls=%fused_product
  ROOT %states = (s32[], bf16[4,8]{1,0}, bf16[8,16]{1,0}) tuple(%count, %left, %right)
}

%cond (state.6: (s32[], bf16[4,8], bf16[8,16])) -> pred[] {
  %state.6 = (s32[], bf16[4,8]{1,0}, bf16[8,16]{1,0}) parameter(0)
  %end = s32[] constant(3)
  %count.6 = s32[] get-tuple-element(%state.6), index=0
  ROOT %less = pred[] compare(%count.6, %end), direction=LT
}

%fused_batch (param_0.3: bf16[2,4,8], param_1.3: bf16[2,8,4]) -> bf16[2,4,4] {
  %param_0.3 = bf16[2,4,8]{2,1,0} parameter(0)
  %param_1.3 = bf16[2,8,4]{2,1,0} parameter(1)
  ROOT %convolution.2 = bf16[2,4,4]{2,1,0} convolution(%param_0.3, %param_1.3), \
window={size=2 stride=1 lhs_dilate=2}, dim_labels=0bf_0io->0bf
}

ENTRY %main (x: bf16[4,8], y: bf16[8,16], z: bf16[2,4,8], w: bf16[2,8,4]) -> bf16[4,16] {
  %x = bf16[4,8]{1,0} parameter(0)
  %y = bf16[8,16]{1,0} parameter(1)
  %z = bf16[2,4,8]{2,1,0} parameter(2)
  %w = bf16[2,8,4]{2,1,0} parameter(3)
  %start = s32[] constant(0)
  %tuple = (s32[], bf16[4,8]{1,0}, bf16[8,16]{1,0}) tuple(%start, %x, %y)
  %loop = (s32[], bf16[4,8]{1,0}, bf16[8,16]{1,0}) while(%tuple), condition=%cond, body=%body
  %call = (bf16[2,4,4]{2,1,0}, s8[64]{0}) custom-call(%z, %z), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["2"]}}}
  %batch = bf16[2,4,4]{2,1,0} fusion(%z, %w), kind=kOutput, calls=%fused_batch
  ROOT %last = bf16[4,16]{1,0} fusion(%x, %y), kind=kOutput, calls=%fused_convolution
}
"""


def test_products_of_fusions_loops_calls_and_convolutions():
    """Each kind of product is counted, in a loop once a trip; without one the step looks free."""
    counts = [(kernel.times, kernel.flops) for kernel in roofline.kernels(TEXT) if kernel.flops]
    batch = (1, 2 * 2 * 4 * 8 * 4)
    assert counts == [(3, 2 * 4 * 8 * 16), batch, batch, (1, 2 * 4 * 8 * 16)]


def test_products_of_a_scanned_loss():
    """A program of this machine's compiler: 3 products of 6 x 40 x 24 a trip of 5."""

    def loss(rows, matrix):
        def add(total, row):
            return total + jnp.sin(row @ matrix).sum(), None

        return jax.lax.scan(add, 0.0, rows)[0]

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((5, 6, 40), (40, 24))]
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile()
    kernels = roofline.kernels(compiled.as_text())
    assert sum(kernel.times * kernel.flops for kernel in kernels) == 5 * 3 * 2 * 6 * 40 * 24


def test_a_kernel_takes_the_longer_of_flops_and_bytes():
    """A product below the ridge takes as long as its bytes."""
    rates = Rates(flops=100.0, bandwidth=10.0)
    assert Kernel(None, 2, 400, 10).seconds(rates) == 2 * 4
    assert Kernel(None, 2, 400, 100).seconds(rates) == 2 * 10


def test_a_device_without_rates():
    """One line with the devices that there are."""
    with refuses("--target=a100", "h100"):
        roofline.rates_of("a100")
