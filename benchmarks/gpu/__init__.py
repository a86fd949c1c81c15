"""``python -m benchmarks gpu``: what only a GPU can show, in sections of a process each, within a time limit."""
