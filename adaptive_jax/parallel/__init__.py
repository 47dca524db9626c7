"""Devices and hosts: where arrays lie, and who speaks."""
