"""Captions by a server with OpenAI's chat completions interface, such as a local one of llama.cpp, vLLM or Ollama."""

import base64
import http.client
import io
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..problems import Problem

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_ATTEMPTS = 4
RETRIED_STATUS = (408, 409, 425, 429, 500, 502, 503, 504)
MAX_SIDE = 1536
"""The longest side of an image that is sent, in pixels; images above it are reduced."""


class ApiCaptioner:
    """Sends one request per image, as many at once as the batch has."""

    def __init__(
        self, base_url: str, model: str, prompt: str, api_key: str | None, max_new_tokens: int, timeout: float
    ):
        self.url = base_url.rstrip("/") + "/chat/completions"
        self.model, self.prompt, self.api_key = model, prompt, api_key
        self.max_new_tokens, self.timeout = max_new_tokens, timeout
        self.first_pause = 1.0
        """Seconds before the first retry; each pause is twice the one before."""

    def write_captions(self, images: Sequence["Image"]) -> list[str]:
        with ThreadPoolExecutor(max(1, len(images))) as pool:
            return list(pool.map(self._write_caption, images))

    def _write_caption(self, image: "Image") -> str:
        content = [
            {"type": "text", "text": self.prompt},
            {"type": "image_url", "image_url": {"url": _encode_data_url(image)}},
        ]
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.max_new_tokens,
            "temperature": 0,
        }
        answer = self._post(json.dumps(body).encode())
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise UserError(
                Problem("api_base", "the answer has no choices[0].message.content", value=self.url)
            ) from None
        return " ".join(str(text or "").split())

    def _post(self, body: bytes) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        pause = self.first_pause
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                request = urllib.request.Request(self.url, body, headers)
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                if error.code not in RETRIED_STATUS or attempt == MAX_ATTEMPTS:
                    raise UserError(Problem("api_base", _describe_http_error(error), value=self.url)) from None
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:  # refused, cut off, too slow
                if attempt == MAX_ATTEMPTS:
                    reason = getattr(error, "reason", None) or error
                    raise UserError(
                        Problem("api_base", f"no answer after {attempt} attempts: {reason}", value=self.url)
                    ) from None
            time.sleep(pause)
            pause *= 2
        raise AssertionError("the last attempt returns or raises")


def _describe_http_error(error: urllib.error.HTTPError) -> str:
    try:
        message = json.loads(error.read()).get("error", "")
        message = message.get("message", "") if isinstance(message, dict) else message
    except (ValueError, AttributeError, OSError):
        message = ""
    hint = "; set the environment variable OPENAI_API_KEY" if error.code in (401, 403) else ""
    return f"{error.code} {error.reason}{f': {message}' if message else ''}{hint}"


def _encode_data_url(image: "Image") -> str:
    image = image.copy()
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    data = io.BytesIO()
    image.save(data, "JPEG", quality=92)
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"
