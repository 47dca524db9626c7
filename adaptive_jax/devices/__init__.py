"""Devices and hosts: where arrays lie, and how processes work together."""
