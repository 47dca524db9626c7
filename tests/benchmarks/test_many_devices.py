"""The simulated streams of kernels and collectives, against times by hand."""

import pytest

from benchmarks.many_devices import Link, Schedule, scaled, seconds_on_link
from benchmarks.roofline import Rates

# A collective of 400 bytes beside a product of 1 second, a wait for it, and one that kernels cannot
# run beside. A product of 10 x 10 x 5 has 1,000 FLOPs.
TEXT = """\
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[10,5], y: f32[5,10], g: f32[100]) -> f32[10,10] {
  %x = f32[10,5]{1,0} parameter(0)
  %y = f32[5,10]{1,0} parameter(1)
  %g = f32[100]{0} parameter(2)
  %start = f32[100]{0} all-reduce-start(%g), channel_id=1, to_apply=%add
  %product = f32[10,10]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %done = f32[100]{0} all-reduce-done(%start)
  %gathered = f32[100]{0} all-gather(%g), channel_id=2, dimensions={0}
  ROOT %last = f32[10,10]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
RATES = Rates(flops=1000, bandwidth=1e9)
LINK = Link(inside=200, outside=100, devices=4)


def test_kernels_wait_for_what_does_not_run_beside_them():
    """4 devices: the sum takes 2 · 3/4 · 400 / 200 = 3 seconds, 1 of them beside the product; the
    gather 1.5 seconds, all of them exposed.
    """
    schedule = Schedule(TEXT, RATES, 4, LINK)
    exposed = [(one.kind, one.bytes, one.exposed) for one in schedule.exchanges]
    assert exposed == [
        ("all-reduce", 400, pytest.approx(2, rel=1e-5)),
        ("all-gather", 400, pytest.approx(1.5)),
    ]
    assert schedule.kernels == pytest.approx(2, rel=1e-5)
    assert schedule.clock == pytest.approx(5.5, rel=1e-5)
    assert scaled(schedule, 4) == pytest.approx(schedule.clock)
    assert scaled(schedule, 1) == pytest.approx(schedule.kernels)


def test_bytes_over_hosts():
    """8 devices on 2 hosts: after the ring inside, each device has a quarter to exchange, of which
    half is on the other host.
    """
    assert seconds_on_link("all-gather", 400, 8, LINK) == 0.75 * 400 / 200 + 0.5 * 100 / 100
    assert seconds_on_link("all-reduce", 400, 8, LINK) == 2 * (1.5 + 0.5)
    assert seconds_on_link("all-gather", 400, 1, LINK) == 0
