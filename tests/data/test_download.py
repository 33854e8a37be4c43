import hashlib
import http.server
import socket
import threading

import pytest

from fastgpt.data import download
from fastgpt.data.download import published_file
from fastgpt.errors import UserError
from fastgpt.files import cache_dir

CONTENT = bytes(range(256)) * 2000  # several chunks
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with `server.status`; a number from 1000 on is the bytes after which it ends."""

    def do_GET(self):
        self.server.requests += 1
        status = self.server.status
        body = CONTENT[:status] if status >= 1000 else b""
        self.send_response(200 if body else status)
        self.send_header("Content-Length", str(len(CONTENT) if body else 0))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.status, server.requests = len(CONTENT), 0
        server.url = f"http://127.0.0.1:{server.server_port}/x.bin"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTGPT_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def get(server, data):
    """Fetches the server's file."""

    def get(url=server.url, sha256=SHA256):
        return published_file("x.bin", url, sha256=sha256, what="mine", instead="x.bin")

    return get


def test_file_is_fetched_once_and_replaced_if_it_is_another(server, get, tmp_path):
    path = cache_dir() / "x.bin"
    assert [get(), get()] == [path] * 2
    assert (path.read_bytes(), server.requests) == (CONTENT, 1)
    (tmp_path / "mine").write_bytes(b"mine")
    path.unlink()
    path.symlink_to(tmp_path / "mine")
    assert get().read_bytes() == CONTENT
    assert (tmp_path / "mine").read_bytes() == b"mine"
    assert {file.name for file in path.parent.iterdir()} == {"x.bin"}


def test_own_file_is_taken_and_must_be_the_published_one(server, get, data):
    (data / "x.bin").write_bytes(b"other")
    with pytest.raises(UserError, match=f"x.bin is not mine: its sha256 is .*, expected {SHA256}"):
        get()
    (data / "x.bin").write_bytes(CONTENT)
    assert get() == data / "x.bin"
    assert server.requests == 0


@pytest.mark.parametrize(
    ("status", "sha256", "reason"),
    [
        (404, SHA256, "404 Client Error"),
        (1000, SHA256, r"IncompleteRead\(1000 bytes read, 511000 more expected\)"),
        (len(CONTENT), "0" * 64, f"it has sha256 {SHA256}, expected {'0' * 64}"),
    ],
)
def test_failure_is_one_line_and_leaves_nothing(server, get, data, status, sha256, reason):
    server.status = status
    said = rf"^put x.bin into {data} by hand.*: cannot download {server.url}: {reason}[^\n]*$"
    with pytest.raises(UserError, match=said):
        get(sha256=sha256)
    assert server.requests == 1
    assert not [*cache_dir().iterdir()]


@pytest.mark.parametrize(("open", "reason"), [(False, "Connection refused"), (True, "timed out")])
def test_server_that_does_not_answer_is_named(get, monkeypatch, open, reason):
    monkeypatch.setattr(download, "TIMEOUTS_S", (1, 0.02))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.bin"
        if not open:
            silent.close()
        with pytest.raises(UserError, match=f": cannot download {url}: {reason}$"):
            get(url)


def test_folder_that_cannot_be_made_is_named(get):
    cache_dir().touch()
    with pytest.raises(UserError, match=r"cannot write .*cache/x"):
        get()
