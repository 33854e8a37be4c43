"""The page, in a browser without a window that takes commands over a pipe."""

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
        command = (
            f'exec "{CHROMIUM}" --headless --no-sandbox --disable-gpu --window-size=900,700'
            f' --remote-debugging-pipe --user-data-dir="{folder}" 3<&{theirs} 4>&{answers}'
        )
        options = {"pass_fds": (theirs, answers), "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(["bash", "-c", command], **options)
        os.close(theirs), os.close(answers)
        self.to, self.back, self.page = os.fdopen(to, "wb"), os.fdopen(back, "rb"), {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.page = {"sessionId": session["sessionId"]}

    def call(self, method: str, **params):
        message = {"id": 1, "method": method, "params": params, **self.page}
        self.to.write(json.dumps(message).encode() + b"\0")
        self.to.flush()
        while True:  # what has no id is an event
            found = json.loads(b"".join(iter(lambda: self.back.read(1), b"\0")))
            if "id" in found:
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


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.call("Browser.close")
    browser.process.wait(20)
    browser.to.close(), browser.back.close()


@pytest.mark.parametrize("chat", [True, False])
def test_a_person_can_talk_with_the_model(browser, model, chat):  # noqa: F811
    run, until = browser.run, browser.until
    with serving(model, template=Template() if chat else None) as address:
        browser.call("Page.navigate", url=address)
        until("document.title === 'tiny'")
        run("max_tokens.value = 150; seed.value = 3; ask.value = 'hi <b>'; send.click()")
        until("document.querySelectorAll('[data-shown]').length > 2")
        run("$('stop').click()")
        until("!running")
        assert "(stopped)" in run("state.textContent")
        begun = run("said.lastElementChild.textContent")
        run("again.click()")
        until("!running && state.textContent.includes('a second (limit of')")
        assert run("said.children.length + said.firstElementChild.textContent") == "2hi <b>"
        again = run("said.lastElementChild.textContent")
        assert again.startswith(begun)
        assert len(again) > len(begun)
        run(short := "max_tokens.value = 3; again.click()")
        until(done := "!running && state.textContent.startsWith('3 tokens')")
        run("max_tokens.value = 0; ask.value = 'ho'; send.click()")
        until("document.querySelector('.error')?.textContent.includes('max_tokens')")
        assert run("ask.value") == ("" if chat else "ho"), "a refused text may be edited"
        run(short)
        until(done)
        own = run("[...document.querySelectorAll('.user')].map(x => x.textContent).join()")
        assert own == ("hi <b>,ho" if chat else "hi <b>"), "an error takes no text away"
        assert run("said.children.length") == (4 if chat else 2)
