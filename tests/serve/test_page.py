"""The page, in a browser without a window that takes commands over a pipe."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.serve.test_serve import Template, model, serving  # noqa: F401 - a fixture

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


class Browser:
    """A page of Chromium, steered by the DevTools protocol: JSON that ends in a zero."""

    def __init__(self, folder: Path) -> None:
        (theirs, to), (back, answers) = os.pipe(), os.pipe()
        flags = (
            "--headless --no-sandbox --disable-gpu --window-size=900,700 --remote-debugging-pipe"
        )
        command = f'exec "{CHROMIUM}" {flags} --user-data-dir="{folder}" 3<&{theirs} 4>&{answers}'
        self.process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(theirs, answers), stderr=subprocess.DEVNULL
        )
        os.close(theirs), os.close(answers)
        self.to, self.back, self.ids, self.page = (
            os.fdopen(to, "wb"),
            os.fdopen(back, "rb"),
            itertools.count(),
            {},
        )
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.page = {"sessionId": session["sessionId"]}

    def call(self, method: str, **params):
        number = next(self.ids)
        message = {"id": number, "method": method, "params": params, **self.page}
        self.to.write(json.dumps(message).encode() + b"\0")
        self.to.flush()
        while True:
            found = json.loads(b"".join(iter(lambda: self.back.read(1), b"\0")))
            if found.get("id") == number:
                return found["result"]

    def run(self, script: str):
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, condition: str) -> None:
        ends = time.monotonic() + 30
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < ends, (condition, self.run("document.body.innerText"))
            time.sleep(0.02)

    def shot(self, name: str) -> None:
        """Keeps a picture where PAGE_SHOTS names a folder."""
        if folder := os.environ.get("PAGE_SHOTS"):
            data = self.call("Page.captureScreenshot")["data"]
            Path(folder, f"{name}.png").write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self.call("Browser.close")
        self.process.wait(20)
        self.to.close(), self.back.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


SAY = "document.getElementById('ask').value = 'hi <b>'; document.getElementById('send').click()"
DONE = "!running && document.getElementById('state').textContent.includes('a second')"


@pytest.mark.parametrize("chat", [True, False])
def test_a_person_can_talk_with_the_model(browser, model, chat):  # noqa: F811
    with serving(model, template=Template() if chat else None) as address:
        browser.call("Page.navigate", url=address)
        browser.until("document.title === 'tiny'")
        browser.run("max_tokens.value = 150; seed.value = 3")
        browser.run(SAY)
        browser.until("document.querySelectorAll('[data-shown]').length > 2")
        assert browser.run("running !== null")
        browser.run("document.getElementById('stop').click()")
        browser.until("!running")
        assert "(stopped)" in browser.run("state.textContent")
        begun = browser.run("said.lastElementChild.textContent")
        browser.run("again.click()")
        browser.until(DONE)
        assert browser.run("said.children.length") == 2
        assert browser.run("said.firstElementChild.textContent") == "hi <b>"
        again = browser.run("said.lastElementChild.textContent")
        assert again.startswith(begun)
        assert len(again) > len(begun)
        shown = "document.querySelector('[data-shown]')"
        browser.run(f"{shown}.scrollIntoView()")
        place = browser.run(f"JSON.stringify({shown}.getBoundingClientRect())")
        x, y = (json.loads(place)[name] + 2 for name in ("x", "y"))
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        browser.until("!tip.hidden")
        assert browser.run("tip.textContent.split('\\n').length") >= 3
        assert ' %  "' in browser.run("tip.textContent")
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.call("Emulation.setEmulatedMedia", features=features)
            browser.shot(f"{'chat' if chat else 'text'}-{scheme}")
        dark = browser.run("getComputedStyle(document.body).backgroundColor")
        assert dark == "rgb(23, 24, 26)"
        browser.run("max_tokens.value = 0")
        browser.run(SAY)
        browser.until("document.querySelector('.error')")
        assert "max_tokens" in browser.run("document.querySelector('.error').textContent")
