"""What nearly every test that trains in a process of its own needs, done once in the server that such processes fork from.

It starts no thread and computes no gradient: neither would survive the fork.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import test_run  # noqa: E402, F401 - its imports
import torch  # noqa: E402
from diffusers.loaders import peft  # noqa: E402, F401
from tiny import stand_in_folder  # noqa: E402
from transformers import CLIPTextModel  # noqa: E402

import library.families.sd1  # noqa: E402
import library.training.run  # noqa: E402, F401

torch.set_num_threads(1)
# For its first model transformers compiles more than a thousand regular expressions.
CLIPTextModel.from_pretrained(stand_in_folder(), subfolder="text_encoder")
