"""What nearly every test that trains in a process of its own needs, done once in the server that they fork from.

No thread is started and no gradient is computed, since neither would survive the fork.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import training_runs  # noqa: F401 - with what tests and runs import
from diffusers.loaders import peft  # noqa: F401
from tiny_pipelines import get_tiny_sd1_folder
from transformers import CLIPTextModel

import library.models.families.sd1_sd2
import library.training.run  # noqa: F401

torch.set_num_threads(1)
torch.compile(len)  # which compiles nothing yet, but imports what does; DeepSpeed calls it as well
# For the first model that it loads transformers compiles more than a thousand regular expressions.
CLIPTextModel.from_pretrained(get_tiny_sd1_folder(), subfolder="text_encoder")
