import hashlib
import http.server
import multiprocessing
import re
import socket
import struct
import threading
import time
from contextlib import suppress
from email.utils import formatdate

import pytest

from fastgpt.data import download
from fastgpt.data.download import fetch
from fastgpt.errors import UserError

INSTEAD = "put it at data/x.bin"
CONTENT = bytes(range(256)) * 2000  # several chunks
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves one file; `faults` are what goes wrong with the next requests, one each."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.headers = CONTENT, {"ETag": '"one"'}
        self.knows_ranges = True
        self.faults, self.seen, self.sent = [], [], 0
        self.url = f"http://127.0.0.1:{self.server_port}/x.bin"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        server, asked = self.server, self.headers.get("Range")
        server.seen.append((asked, self.headers.get("If-Range")))
        fault = server.faults.pop(0) if server.faults else {}
        if "status" in fault:
            self.answer(fault["status"], {"Content-Length": 0, **fault.get("headers", {})})
            return
        same = self.headers.get("If-Range") in (None, *server.headers.values())
        size = len(server.content)
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and server.knows_ranges else 0
        if not same:
            start = 0
        body = server.content[start : start + fault.get("part", size)]
        headers = {**server.headers, "Content-Length": len(body)}
        if start:
            headers["Content-Range"] = fault.get(
                "range", f"bytes {start}-{start + len(body) - 1}/{size}"
            )
        self.answer(206 if start else 200, headers)
        cut = fault.get("cut", len(body))
        server.sent += len(body[:cut])  # before the client can be done with it
        with suppress(OSError):
            self.wfile.write(body[:cut])
        if fault.get("reset"):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def answer(self, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def get(server, tmp_path):
    """Fetches the server's file without waiting; `get.waits` are the pauses it would have made."""

    def get(sha256=SHA256, url=None, **more):
        path = tmp_path / "cache" / "x.bin"
        fetch(url or server.url, path, sha256=sha256, instead=INSTEAD, sleep=waits.append, **more)
        return path.read_bytes()

    waits = get.waits = []
    return get


def names(tmp_path):
    return {path.name for path in (tmp_path / "cache").iterdir()}


def test_file_appears_whole_and_is_fetched_once(server, get, tmp_path):
    heard = []
    assert get(progress=lambda done, total: heard.append((done, total))) == CONTENT
    assert names(tmp_path) == {"x.bin", ".x.bin.lock"}
    assert heard[0] == (0, len(CONTENT))
    assert heard[-1] == (len(CONTENT), len(CONTENT))
    assert heard == sorted(heard)
    assert get() == CONTENT
    assert len(server.seen) == 1


def test_dropped_connection_is_resumed_and_no_byte_sent_twice(server, get):
    server.faults = [{"cut": 100_000}, {"cut": 200_000}]
    assert get() == CONTENT
    assert server.seen == [
        (None, None), ("bytes=100000-", '"one"'), ("bytes=300000-", '"one"'),
    ]  # fmt: skip
    assert server.sent == len(CONTENT)


def test_reset_connection_is_resumed(server, get):
    server.faults = [{"cut": 300_000, "reset": True}]
    assert get() == CONTENT
    assert len(server.seen) == 2


def test_progress_renews_the_attempts(server, get):
    server.faults = [{"cut": 50_000}] * 8
    assert get() == CONTENT
    assert max(get.waits) < 2  # each was a first failure


@pytest.fixture
def killed(server, get, tmp_path):
    """A download that ended in the middle, as a kill would leave it."""
    server.faults = [{"cut": 100_000}, *[{"status": 503}] * (download.ATTEMPTS - 1)]
    with pytest.raises(UserError, match=r"HTTP 503 .*\(5 attempts\); put it at data/x.bin"):
        get()
    assert names(tmp_path) == {".x.bin.part", ".x.bin.part.json", ".x.bin.lock"}
    assert (tmp_path / "cache" / ".x.bin.part").read_bytes() == CONTENT[:100_000]
    server.seen.clear()
    server.sent = 0
    return tmp_path / "cache" / ".x.bin.part"


def test_later_process_goes_on(killed, server, get):
    assert get() == CONTENT
    assert server.seen == [("bytes=100000-", '"one"')]
    assert server.sent == len(CONTENT) - 100_000


def test_server_may_send_less_than_asked_for(killed, server, get):
    server.faults = [{"part": 1000}]
    assert get() == CONTENT
    assert [asked for asked, _ in server.seen] == ["bytes=100000-", "bytes=101000-"]


def test_complete_part_is_not_fetched_again(killed, server, get):
    killed.write_bytes(CONTENT)
    assert get() == CONTENT
    assert server.seen == []


@pytest.mark.parametrize(
    "change",
    [
        {"content": CONTENT[::-1], "headers": {"ETag": '"two"'}},
        {"content": CONTENT[::-1], "headers": {"Last-Modified": formatdate(0, usegmt=True)}},
        {"knows_ranges": False},
        {"faults": [{"range": "bytes 5-511999/512000"}]},
        {"faults": [{"range": "bytes 100000-511999/9"}]},
        {"faults": [{"status": 416}]},
    ],
    ids=["etag", "other-validator", "range-ignored", "other-start", "other-length", "416"],
)
def test_what_does_not_continue_the_part_starts_over(killed, server, get, change):
    vars(server).update(change)
    assert get(sha256=None) == server.content
    assert server.seen[0] == ("bytes=100000-", '"one"')
    assert server.sent >= len(CONTENT)


def test_other_etag_in_a_206_starts_over(killed, server, get, monkeypatch):
    """Of a server that knows ranges and ignores If-Range."""
    monkeypatch.setattr(download, "_validator", lambda response: '"two"')
    assert get(sha256=None) == CONTENT
    assert server.sent > len(CONTENT)


def test_parts_that_could_be_of_another_file_are_not_kept(server, get, killed):
    (killed.parent / ".x.bin.part.json").write_text('{"url": "http://else", "total": 512000}')
    assert get() == CONTENT
    assert server.seen == [(None, None)]


def test_without_validator_only_a_checksum_allows_to_resume(server, get, tmp_path):
    server.headers = {"ETag": 'W/"weak"'}
    for sha256, asked in ((None, None), (SHA256, "bytes=9-")):
        server.faults = [{"cut": 9}]
        assert get(sha256) == CONTENT
        assert server.seen[-1] == (asked, None)
        (tmp_path / "cache" / "x.bin").unlink()


def test_wrong_sha256_is_removed_and_named(server, get, tmp_path):
    expected = hashlib.sha256(b"").hexdigest()
    with pytest.raises(
        UserError, match=rf"cannot download {server.url}: .*{SHA256}, expected {expected}; put it"
    ):
        get(expected)
    assert names(tmp_path) == {".x.bin.lock"}
    assert len(server.seen) == 1


def test_file_with_another_sha256_is_replaced(server, get, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "x.bin").write_text("old")
    assert get(sha256=None) == b"old"
    assert get() == CONTENT


def test_404_is_final(server, get):
    server.faults = [{"status": 404}]
    with pytest.raises(UserError, match=r"x\.bin: HTTP 404 Not Found; put it at data/x\.bin"):
        get()
    assert get.waits == []


def test_passing_errors_are_waited_for(server, get):
    server.faults = [
        {"status": 503}, {"status": 408}, {"status": 429, "headers": {"Retry-After": 17}},
        {"status": 503, "headers": {"Retry-After": formatdate(time.time() + 9e9, usegmt=True)}},
    ]  # fmt: skip
    assert get() == CONTENT
    first, second, third, fourth = get.waits
    assert 1 <= first <= 1.5
    assert 2 <= second <= 3
    assert (third, fourth) == (17, download.LONGEST_WAIT_S)


def test_offline_says_why_and_what_to_do(get):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/x.bin"
    with pytest.raises(
        UserError, match=rf"^cannot download {url}: Connection refused \(5 attempts\); {INSTEAD}$"
    ):
        get(url=url)
    assert len(get.waits) == download.ATTEMPTS - 1


def test_silent_server_times_out(get, monkeypatch):
    monkeypatch.setattr(download, "READ_TIMEOUT_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.bin"
        with pytest.raises(UserError, match="timed out"):
            get(url=url)


def test_folder_that_cannot_be_made_is_named(server, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*file/x"):
        fetch(server.url, tmp_path / "file" / "x", sha256=None, instead=INSTEAD)


def test_empty_file(server, get):
    server.content = b""
    assert get(sha256=None) == b""


def test_processes_share_one_download(server, tmp_path):
    start = multiprocessing.get_context("spawn").Process
    arguments = {"sha256": SHA256, "instead": INSTEAD}
    tasks = [
        start(target=fetch, args=(server.url, tmp_path / "x.bin"), kwargs=arguments)
        for _ in range(3)
    ]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    assert [task.exitcode for task in tasks] == [0, 0, 0]
    assert (tmp_path / "x.bin").read_bytes() == CONTENT
    assert len(server.seen) == 1
