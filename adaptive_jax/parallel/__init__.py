"""Devices and hosts: the sharding of arrays, and what hosts do together."""
