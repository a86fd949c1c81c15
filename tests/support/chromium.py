"""A real browser without a package of its own: Chromium, driven through its DevTools protocol.

Only what the tests of the page need: addresses, clicks at places on the screen, keys, files that are dropped or chosen,
and pictures of the screen.
"""

import asyncio
import base64
import json
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
KEYS = {"Tab": 9, "Enter": 13, " ": 32, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
KEYS |= {"End": 35, "Home": 36}
KEYS |= {"Delete": 46, "f": 70}
TEXT_KEYS = {"Enter": "\r", " ": " "}

LOOK = """(selector) => {
  const active = document.activeElement, box = active.getBoundingClientRect(), name = active.id || active.outerHTML;
  if (active === document.body) return ["", false];
  const x = Math.min(Math.max(box.left, 0) + box.right, 2 * innerWidth) / 2;
  const y = (Math.max(box.top, 0) + Math.min(box.bottom, innerHeight)) / 2;
  const shown = document.elementFromPoint(x, y), holder = active.closest(".option-card") ?? active;
  if (!shown || !active.contains(shown) && !shown.contains(active)) return [`hidden: ${name}`, active.matches(selector)];
  const isMarked = [active, holder].some((each) => {
    const style = getComputedStyle(each);
    return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
  });
  return [isMarked ? "" : `not marked: ${name}`, active.matches(selector)];
}"""
"""What is wrong with how the focus is seen, and whether it has arrived."""


def find_chromium() -> str | None:
    """Return the path of a Chromium on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One window; JavaScript errors and refusals of the content security policy are collected in ``errors``."""

    def __init__(self, program: str, profile: Path, width: int = 1280, height: int = 860):
        import aiohttp

        command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        command += [f"--user-data-dir={profile}", "--no-first-run", "--disable-extensions", "about:blank"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.loop, self.errors, self.timeout = asyncio.new_event_loop(), list[str](), 60.0
        self.faults, self.file_choosers = set[str](), list[int]()
        self._number, self.width, self.height = 0, width, height
        address = next(found[1] for line in self.process.stderr if (found := re.search(r"ws://([\w.:]+)/", line)))
        self.session = self.loop.run_until_complete(self._make_session(aiohttp))
        self.socket = self.loop.run_until_complete(self._connect(address))
        for domain in ("Page", "Runtime", "DOM", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    async def _make_session(self, aiohttp: Any) -> Any:
        return aiohttp.ClientSession()

    async def _connect(self, address: str) -> Any:
        async with self.session.put(f"http://{address}/json/new?about:blank") as answer:
            target = await answer.json()
        return await self.session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        return self.loop.run_until_complete(self._exchange(message))

    async def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        await self.socket.send_str(json.dumps(message))
        while True:
            answer = json.loads((await asyncio.wait_for(self.socket.receive(), 120)).data)
            if answer.get("id") == message["id"]:
                assert "error" not in answer, f"{message['method']}: {answer['error']}"
                return answer["result"]
            self._note_event(answer)

    def _note_event(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Page.fileChooserOpened":
            self.file_choosers.append(event["params"]["backendNodeId"])
        if event.get("method") == "Runtime.exceptionThrown":
            details = event["params"]["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        if event.get("method") == "Log.entryAdded" and "Content Security Policy" in event["params"]["entry"]["text"]:
            self.errors.append(event["params"]["entry"]["text"])

    def evaluate(self, script: str) -> Any:
        """Run JavaScript in the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def goto(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def wait_for(self, condition: str, seconds: float | None = None) -> None:
        """Wait until a JavaScript expression is true; while a page is loaded it is not."""
        deadline = time.monotonic() + (seconds or self.timeout)
        while time.monotonic() < deadline:
            try:
                if self.evaluate(f"!!({condition})"):
                    return
            except AssertionError:  # the context is gone while a page is loaded
                pass
            time.sleep(0.05)
        raise AssertionError(f"{condition} did not come at {self.evaluate('location.href')}: {self.read_text()[:2000]}")

    def wait_for_text(self, text: str, seconds: float | None = None) -> None:
        self.wait_for(f"document.body?.innerText.includes({json.dumps(text)})", seconds)

    def read_text(self, selector: str = "body") -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def locate(self, selector: str) -> tuple[float, float]:
        """Scroll to an element; return the middle of it."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.wait_for(f"{found}?.getClientRects().length")
        self.evaluate(f"{found}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = f"(box => [box.x + box.width / 2, box.y + box.height / 2])({found}.getBoundingClientRect())"
        x, y = self.evaluate(box)
        return x, y

    def click(self, selector: str) -> None:
        """Click where the element is on the screen: what covers it gets the click."""
        x, y = self.locate(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def fill(self, selector: str, text: str) -> None:
        self.evaluate(
            f"(field => {{ field.focus(); field.select(); }})(document.querySelector({json.dumps(selector)}))"
        )
        self.call("Input.insertText", text=text)
        self.press("Tab")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press a key; modifiers: 2 for Ctrl, 8 for Shift."""
        facts = {"key": key, "code": key if key != " " else "Space", "windowsVirtualKeyCode": KEYS.get(key, 0)}
        text = {"text": TEXT_KEYS[key]} if key in TEXT_KEYS and not modifiers & 2 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", modifiers=modifiers, **facts, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", modifiers=modifiers, **facts)

    def walk_to(self, selector: str, steps: int = 150, modifiers: int = 0) -> None:
        """Press Tab until an element has the focus; where that is not seen on the way is noted in ``faults``."""
        for _ in range(steps):
            self.press("Tab", modifiers)
            fault, has_arrived = self.evaluate(f"({LOOK})({json.dumps(selector)})")
            self.faults |= {fault} - {""}
            if has_arrived:
                return
        raise AssertionError(f"{selector} is not reached by Tab")

    def use(self, selector: str, key: str = "Enter", modifiers: int = 0) -> None:
        """Walk to an element and press a key there."""
        self.walk_to(selector, modifiers=modifiers)
        self.press(key)

    def wait_for_focus(self, selector: str) -> None:
        self.wait_for(f"document.activeElement.matches({json.dumps(selector)})")

    def answer_file_chooser(self, files: Sequence[Path], key: str = "Enter") -> None:
        """Press a key that opens the dialog for files, and choose some there."""
        self.call("Page.setInterceptFileChooserDialog", enabled=True)
        self.press(key)
        deadline = time.monotonic() + self.timeout
        while not self.file_choosers and time.monotonic() < deadline:
            self.evaluate("0")
        node = self.file_choosers.pop()
        self.call("DOM.setFileInputFiles", files=[*map(str, files)], backendNodeId=node)
        self.call("Page.setInterceptFileChooserDialog", enabled=False)

    def list_unnamed_controls(self) -> list[str]:
        """List what can have the focus and has no name for a screen reader, by the accessibility tree of the page."""
        found = []
        for node in self.call("Accessibility.getFullAXTree")["nodes"]:
            role = node.get("role", {}).get("value", "")
            can_focus = any(
                each["name"] == "focusable" and each["value"]["value"] for each in node.get("properties", [])
            )
            if node.get("ignored") or role == "RootWebArea" or not (can_focus or role == "progressbar"):
                continue
            if not node.get("name", {}).get("value", "").strip():
                described = self.call("DOM.describeNode", backendNodeId=node["backendDOMNodeId"])["node"]
                found.append(f"{role}: {described['nodeName']} {described.get('attributes')}")
        return found

    def drop(self, selector: str, files: Sequence[Path]) -> None:
        """Drop files or folders onto an element, as from a file manager."""
        x, y = self.locate(selector)
        data = {"items": [], "files": [*map(str, files)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    def choose_files(self, selector: str, files: Sequence[Path]) -> None:
        node = self.call("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")["result"]
        self.call("DOM.setFileInputFiles", files=[*map(str, files)], objectId=node["objectId"])

    def resize(self, width: int, height: int, scheme: str = "light") -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def take_picture(self) -> bytes:
        """Return the visible part of the page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        self.loop.run_until_complete(self.socket.close())
        self.loop.run_until_complete(self.session.close())
        self.loop.close()
        self.process.terminate()
        self.process.wait(30)
