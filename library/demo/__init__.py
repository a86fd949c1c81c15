"""The built-in model and its pictures."""
