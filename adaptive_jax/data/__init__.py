"""From text to batches: corpora, their vocabularies, and batches that are pure functions of
(ids, seed, step).
"""
