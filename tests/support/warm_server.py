"""Imports and caches that nearly every training test needs, done once in the server from which its processes fork.

No thread is started and no gradient is computed, since neither survives a fork.
"""

import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import training_runs  # noqa: F401 - imports what tests and runs import
from diffusers.loaders import peft  # noqa: F401
from tiny_pipelines import get_tiny_sd1_folder
from transformers import CLIPTextModel

import library.models.families.sd1_sd2
import library.training.run  # noqa: F401

torch.set_num_threads(1)
torch.compile(len)  # compiles nothing yet, but imports the compiler; DeepSpeed calls it as well
# When it loads the first model, transformers compiles more than a thousand regular expressions.
CLIPTextModel.from_pretrained(get_tiny_sd1_folder(), subfolder="text_encoder")
gc.collect()
gc.freeze()
