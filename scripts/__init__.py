"""Scripts for developers of the trainer, run from the repository root; not part of the package."""
