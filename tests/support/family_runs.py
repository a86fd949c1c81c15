"""Train by command-line options."""


def train(*flags: str) -> None:
    from library.config import parse_config
    from library.training.run import run_training

    run_training(
        parse_config(
            ["--network_train_unet_only", *flags, "--quiet", "--max_data_loader_n_workers", "0"]
        ).require_valid()
    )
