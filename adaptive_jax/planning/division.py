"""Division of an update's rows over devices and microbatches."""

import math
from typing import NamedTuple

from adaptive_jax.errors import InputError

LEAST_GAIN = 0.1  # empty rows are added if they save at least this share of a device's rows


class Division(NamedTuple):
    """Rows of an update on devices.

    Attributes:
        rows: number of rows of an update, without empty ones.
        devices: number of devices that share the rows, equally many on each host.
        microbatches: number of microbatches that a device computes one after another.
        rows_per_device: rows of a microbatch on each device.
    """

    rows: int
    devices: int
    microbatches: int
    rows_per_device: int


def divide(rows: int, rows_held: int, devices: int, hosts: int = 1, *, pad: bool) -> Division:
    """The division of an update over the most devices that share its rows evenly.

        20 rows of streams on 8 devices                -> 4 rows on each of 5 devices
        20 independent rows on 8 devices               -> 3 rows on each of 8, 4 of them empty
        128 rows, 8 held at a time, on 1, 8 and 16     -> 16, 2 and 1 microbatches

    Args:
        rows_held: the most rows that a device holds at a time.
        devices: number of devices of all hosts, which have equally many.
        pad: whether empty rows may be added. They are added if they save a device a tenth of its
            rows or more than half of its microbatches, or if hosts do not divide the rows.

    Raises:
        InputError: the hosts do not divide the rows.
    """
    dividing_counts = [n for n in range(hosts, devices + 1, hosts) if rows % n == 0]
    rows_when_padded = -(-rows // devices)
    if pad and (
        not dividing_counts or rows_when_padded <= (1 - LEAST_GAIN) * (rows // dividing_counts[-1])
    ):
        microbatches = -(-rows_when_padded // rows_held)
        return Division(rows, devices, microbatches, -(-rows_when_padded // microbatches))
    if not dividing_counts:
        raise InputError(
            f"{hosts} hosts cannot share the {rows} rows of an update evenly: use"
            f" {one_of(divisors(rows, hosts))} hosts, or choose tokens_per_update as a multiple of"
            f" sequence_length x {hosts}"
        )
    share = rows // dividing_counts[-1]
    fewest, rows_per_device = -(-share // rows_held), divisors(share, rows_held)[-1]
    microbatches = share // rows_per_device
    if pad and microbatches > 2 * fewest:  # such as for a prime number of rows
        microbatches, rows_per_device = fewest, -(-share // fewest)
    return Division(rows, dividing_counts[-1], microbatches, rows_per_device)


def divisors(number: int, largest: int) -> list[int]:
    """The divisors of a number up to `largest`, ascending."""
    return [n for n in range(1, min(number, largest) + 1) if number % n == 0]


def rows_for_all(rows: int, devices: int) -> int:
    """The number of rows closest to `rows` that all devices can share evenly."""
    return max(1, math.floor(rows / devices + 0.5)) * devices


def one_of(numbers: list[int]) -> str:
    """The numbers as text, such as `1, 2 or 4`."""
    *earlier, last = map(str, numbers)
    return f"{', '.join(earlier)} or {last}" if earlier else last
