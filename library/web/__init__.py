"""The web page, ``python -m library web``: pictures, runs, new runs and LoRA files.  Needs the extra ``web``."""
