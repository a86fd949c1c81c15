"""Captions by an image-text-to-text model of transformers: BLIP, Florence-2, Qwen-VL and others."""

import inspect
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UserError, take_first_line
from ..problems import Problem

if TYPE_CHECKING:
    from PIL.Image import Image

FLORENCE_TASKS = ("<CAPTION>", "<DETAILED_CAPTION>", "<MORE_DETAILED_CAPTION>", "<OCR>")
"""Task tokens of Florence-2 whose answer is text; others answer with positions."""

CHAT_PROMPT = "Describe this image in one paragraph. Write only the description."
"""The prompt for models that are asked in a chat."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class VisionLanguageModel:
    """A model with its processor; ``prompt`` is a question, a task token or the beginning of the caption."""

    def __init__(self, name: str, prompt: str | None, dtype: str | None, max_new_tokens: int, num_beams: int):
        import transformers

        auto: Any = transformers  # whose classes have partial type hints

        try:
            self.model_type: str = auto.AutoConfig.from_pretrained(name).model_type
            self.processor = _load_processor(name)
            accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            self.device = accelerator or torch.get_default_device()
            chosen = DTYPES[dtype] if dtype is not None else torch.bfloat16 if accelerator else torch.float32
            model = auto.AutoModelForImageTextToText.from_pretrained(name, dtype=chosen)
        except (OSError, ValueError, ImportError) as error:
            raise UserError(Problem("model", take_first_line(error), value=name)) from None
        self.model: Any = model.to(self.device).eval()
        self.is_chat = bool(getattr(self.processor, "chat_template", None))
        is_florence = self.model_type == "florence2"
        default = FLORENCE_TASKS[2] if is_florence else CHAT_PROMPT if self.is_chat else None
        self.prompt = prompt if prompt is not None else default
        if is_florence and self.prompt not in FLORENCE_TASKS:
            raise UserError(
                Problem("prompt", f"choose from {', '.join(FLORENCE_TASKS)} for Florence-2", value=str(prompt))
            )
        self.generate_options = {"max_new_tokens": max_new_tokens, "num_beams": num_beams, "do_sample": False}
        tokenizer = getattr(self.processor, "tokenizer", None)
        if tokenizer is not None and self.is_chat:
            tokenizer.padding_side = "left"  # the answers follow the prompts

    @torch.no_grad()
    def write_captions(self, images: Sequence["Image"]) -> list[str]:
        """Return the caption of each image; the images are one batch."""
        inputs = self._prepare_inputs(images)
        dtype = self.model.dtype
        inputs = {
            name: value.to(self.device, dtype if value.is_floating_point() else None)
            for name, value in inputs.items()
            if isinstance(value, Tensor)
        }
        ids = self.model.generate(**inputs, **self.generate_options)
        if self.is_chat and not self.model.config.is_encoder_decoder:
            ids = ids[:, inputs["input_ids"].shape[1] :]
        texts = self.processor.batch_decode(ids, skip_special_tokens=True)
        return [" ".join(text.split()) for text in texts]

    def _prepare_inputs(self, images: Sequence["Image"]) -> Any:
        if not self.prompt:
            return self.processor(images=list(images), return_tensors="pt")
        text = self.prompt
        if self.is_chat:
            content = [{"type": "image"}, {"type": "text", "text": self.prompt}]
            messages = [{"role": "user", "content": content}]
            text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.processor(images=list(images), text=[text] * len(images), padding=True, return_tensors="pt")


def _load_processor(name: str) -> Any:
    """Load the processor; for one that reads videos as well, without torchvision, only what reads images."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    auto: Any = transformers
    if find_spec("torchvision") is not None:
        return auto.AutoProcessor.from_pretrained(name)
    processor_class: Any = PROCESSOR_MAPPING.get(type(auto.AutoConfig.from_pretrained(name)), None)
    if processor_class is None or "video_processor" not in inspect.signature(processor_class.__init__).parameters:
        return auto.AutoProcessor.from_pretrained(name)

    class ImageProcessorOnly(processor_class):  # type: ignore[misc]
        """transformers checks the types of the parts; there is no video processor without torchvision."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is not None:
                return super().check_argument_for_proper_class(argument_name, argument)
            return None

    tokenizer = auto.AutoTokenizer.from_pretrained(name)
    template, _ = auto.ProcessorMixin.get_processor_dict(name)
    return ImageProcessorOnly(
        image_processor=auto.AutoImageProcessor.from_pretrained(name),
        tokenizer=tokenizer,
        video_processor=None,
        chat_template=template.get("chat_template") or getattr(tokenizer, "chat_template", None),
    )
