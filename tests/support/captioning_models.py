"""Tiny vision-language models with random weights, saved as users have them, and a server with OpenAI's interface."""

import json
import string
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from PIL import Image

LETTERS = list(string.ascii_lowercase)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {% for c in m.content %}{% if c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def write_pictures(folder: Path, colors: Sequence[str] = ("red", "blue", "green"), size: int = 40) -> list[Path]:
    """Pictures of one color with a black corner, whose captions are not written yet."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for index, color in enumerate(colors):
        image = Image.new("RGB", (size, size - 4 * index), color)
        image.paste((0, 0, 0), (0, 0, 4, 4))
        paths.append(folder / f"{index}_{color}.png")
        image.save(paths[-1])
    return paths


def save_blip(folder: Path) -> Path:
    """BLIP that writes letters."""
    from transformers import BertTokenizer, BlipConfig, BlipForConditionalGeneration, BlipImageProcessor, BlipProcessor

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[DEC]", *LETTERS]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = BertTokenizer(vocab=vocab, additional_special_tokens=["[DEC]"])
    text: dict[str, Any] = dict(vocab_size=len(names), hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    text |= dict(intermediate_size=16, encoder_hidden_size=16, max_position_embeddings=64)
    text |= dict(bos_token_id=5, eos_token_id=3, pad_token_id=0, sep_token_id=3)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32)
    torch.manual_seed(0)
    model = BlipForConditionalGeneration(BlipConfig(text_config=text, vision_config={**vision, "patch_size": 16}))
    _enlarge_weights(model, 12)
    with torch.no_grad():
        model.text_decoder.cls.predictions.bias[6:] += 100
    model.save_pretrained(folder)
    images = BlipImageProcessor(size={"height": 32, "width": 32})
    BlipProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return folder


def save_qwen_vl(folder: Path) -> Path:
    """Qwen2.5-VL that writes letters; saved without its video processor, which needs torchvision."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2VLImageProcessor,
    )

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
    special += ["<|image_pad|>", "<|video_pad|>"]
    vocab = {name: index for index, name in enumerate([*special, "[UNK]", *LETTERS])}
    raw = Tokenizer(models.WordLevel(vocab, "[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="[UNK]",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=special,
        chat_template=CHAT_TEMPLATE,
    )
    text = dict(vocab_size=len(vocab), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    text |= dict(num_key_value_heads=1, bos_token_id=0, eos_token_id=2, pad_token_id=0, max_position_embeddings=256)
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=32, patch_size=14)
    vision |= dict(spatial_merge_size=2, window_size=56, fullatt_block_indexes=[0])
    tokens = dict(image_token_id=5, video_token_id=6, vision_start_token_id=3, vision_end_token_id=4)
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens))
    _enlarge_weights(model, 12)
    with torch.no_grad():
        model.lm_head.weight[: len(special) + 1].zero_()
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessor(min_pixels=28 * 28 * 2, max_pixels=28 * 28 * 6).save_pretrained(folder)
    return folder


def save_florence2(folder: Path) -> Path:
    """Florence-2, an encoder-decoder with task tokens, that writes letters."""
    from transformers import BartTokenizer, CLIPImageProcessor, Florence2Config, Florence2ForConditionalGeneration
    from transformers.models.florence2.processing_florence2 import Florence2Processor

    names = ["<s>", "<pad>", "</s>", "<unk>", "<image>", "\u0120", *LETTERS]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = BartTokenizer(vocab=vocab, merges=[], extra_special_tokens={"image_token": "<image>"})
    text = dict(model_type="bart", vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1)
    text |= dict(encoder_ffn_dim=16, decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2)
    text |= dict(max_position_embeddings=256, decoder_start_token_id=2, forced_eos_token_id=2, pad_token_id=1)
    vision = dict(depths=[1], patch_size=[8], patch_stride=[8], patch_padding=[0], patch_prenorm=[False])
    vision |= dict(embed_dim=[16], num_heads=[2], num_groups=[2], window_size=4, projection_dim=16)
    config = Florence2Config(text_config=text, vision_config=vision, image_token_id=4)
    torch.manual_seed(0)
    model = Florence2ForConditionalGeneration(config)
    _enlarge_weights(model, 12)
    with torch.no_grad():
        model.model.language_model.get_input_embeddings().weight[:6] = 0
    model.save_pretrained(folder)
    images = CLIPImageProcessor(size={"height": 32, "width": 32}, do_center_crop=False)
    images.image_seq_length = 17  # 4 x 4 patches and their mean
    Florence2Processor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return folder


def _enlarge_weights(model: torch.nn.Module, factor: float) -> None:
    """Make the text depend on picture and prompt, which it hardly does with the small weights of initialization."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)


class ChatServer:
    """A server with ``/v1/chat/completions``, which answers with the mean color of the picture.

    ``failures`` are the first answers: a status, ``"cut"`` for a connection that is cut, or ``None`` for a good one.
    """

    def __init__(self, failures: Sequence[int | str | None] = ()):
        self.failures, self.requests = list(failures), list[dict[str, Any]]()
        self.headers: list[dict[str, str]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._build_handler())
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def __enter__(self) -> "ChatServer":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def _build_handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                failure = server.failures.pop(0) if server.failures else None
                if failure == "cut":
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
                    return
                if isinstance(failure, int):
                    self._send(failure, {"error": {"message": "try later"}})
                    return
                server.requests.append(body)
                server.headers.append(dict(self.headers))
                self._send(200, {"choices": [{"message": {"content": f" a {_name_color(body)}\npicture "}}]})

            def _send(self, status: int, answer: dict[str, Any]) -> None:
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        return Handler


def _name_color(body: dict[str, Any]) -> str:
    import base64
    import io

    (image,) = [part for part in body["messages"][0]["content"] if part["type"] == "image_url"]
    data = base64.b64decode(image["image_url"]["url"].partition("base64,")[2])
    pixel = Image.open(io.BytesIO(data)).convert("RGB").resize((1, 1)).getpixel((0, 0))
    return ("red", "green", "blue")[pixel.index(max(pixel))]
