"""Trained models for other programs: a file of safetensors, or a program of StableHLO that
scores text.
"""
