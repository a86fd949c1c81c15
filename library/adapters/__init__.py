"""LoRA and other adapters: injection, file formats and metadata."""
