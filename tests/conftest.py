"""Every test runs offline, on the CPU, on one thread, and without the user's own settings."""

import os

for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND", "WANDB_API_KEY"):
    os.environ.pop(name, None)
os.environ |= {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
}

from hypothesis import settings  # noqa: E402 - it reads the environment that is set above

settings.register_profile("house", deadline=None)  # how long an example takes says more of the machine than of the code
settings.load_profile("house")
