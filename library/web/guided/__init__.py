"""The five steps from pictures to a LoRA, for those who click: pictures, captions, model, card, start."""
