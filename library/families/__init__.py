"""Model families: one file each, loaded only when chosen."""

from ..registry import Registry

FAMILIES = Registry(
    "model family",
    __package__,
    {
        "sd1": ".sd1:StableDiffusion1",
    },
)
