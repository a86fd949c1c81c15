"""Rules for what is trained: among the options, and against what the model has."""

from collections.abc import Iterator, Sequence

from .schema import RunConfig

Conflict = tuple[tuple[str, ...], str]
"""The options concerned, the one to change first, and what is wrong."""

KEPT_TEXTS = ("cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk")


def contradictions(config: RunConfig, given: frozenset[str]) -> Iterator[Conflict]:
    """Options of the adapter that cannot be honoured together, whatever the model."""
    adapter, optim = config.adapter, config.optim
    if adapter.network_module != "networks.lora":
        yield ("network_module",), f"not yet: {adapter.network_module!r}; this version trains networks.lora"
    both = ("network_train_text_encoder_only", "network_train_unet_only")
    if adapter.network_train_text_encoder_only and both[1] in given and adapter.network_train_unet_only:
        yield both, "together with network_train_unet_only nothing would be trained; leave one out"
    switch = "network_train_text_encoder_only" if adapter.network_train_text_encoder_only else "network_train_unet_only"
    for name in KEPT_TEXTS:
        if getattr(config.cache, name) and adapter.trains_texts:
            yield (
                (name, switch),
                "captions that are encoded once cannot follow a text encoder that is trained; "
                + (f"leave network_train_unet_only on, or take {name} out"
                   if switch == "network_train_unet_only" else f"take {switch} or {name} out"),
            )  # fmt: skip
    if optim.text_encoder_lr and not adapter.trains_texts:
        yield (
            ("text_encoder_lr", "network_train_unet_only"),
            "text encoders are not trained; write network_train_unet_only = false (--no-network_train_unet_only)",
        )
    elif optim.text_encoder_lr and not any(optim.text_encoder_lr):
        yield ("text_encoder_lr",), "0 trains no text encoder; leave it out, and network_train_unet_only on"
    if optim.unet_lr is not None and not adapter.trains_denoiser:
        yield ("unet_lr", "network_train_text_encoder_only"), "the denoiser is not trained; leave one out"
    elif optim.unet_lr == 0:
        yield ("unet_lr",), "0 trains no denoiser; set network_train_text_encoder_only"


def misfits(config: RunConfig, title: str, text_encoders: Sequence[str], t5: str | None) -> Iterator[Conflict]:
    """Options of the adapter that this model cannot honour; ``text_encoders`` are those that can be trained."""
    if not config.adapter.trains_texts:
        return
    if not text_encoders:
        name = "network_train_text_encoder_only"
        name = name if getattr(config.adapter, name) else "network_train_unet_only"
        yield (name,), f"the text encoders of {title} cannot be trained; leave this option out"
        return
    rates, needed = len(config.optim.text_encoder_lr), sum(part != t5 for part in text_encoders)
    if rates > 1 and not needed <= rates <= len(text_encoders):
        yield ("text_encoder_lr",), f"{rates} rates; give one for all, or one for each of {', '.join(text_encoders)}"
