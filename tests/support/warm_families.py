"""Imports of every model family, done once in the server from which the processes of tests fork."""

import gc

import torch

from library.models.families import FAMILIES

with torch.no_grad():
    for name in FAMILIES.list_names():
        family = FAMILIES.get(name)()
        family.get_pipeline_class()
        family.load(f"random:{name}:tiny", torch.float32)
gc.collect()
gc.freeze()
