"""Plans: parameters, work and memory of a run before it starts."""
