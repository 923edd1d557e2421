"""Multi30k's files: for each way in which they can be broken, one line says what to do."""

import gzip
import hashlib
import http.server
import threading

import pooch
import pytest

from scripts.corpora import multi30k as files
from scripts.corpora.load import load_corpus
from scripts.corpora.multi30k import multi30k_text, read_lines

TEXT = b"Ein Hund rennt.\n"
REPACKED = gzip.compress(TEXT, compresslevel=1, mtime=12345)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Multi30k's val.de is one line."""
    monkeypatch.setitem(files.MULTI30K_SHA256, "val.de", hashlib.sha256(TEXT).hexdigest())


def test_load_corpus_refuses_an_unknown_name():
    with pytest.raises(ValueError, match="choose sample, multi30k or a folder"):
        load_corpus("wmt14")


@pytest.mark.parametrize("folder", ["", "data/task1/raw"])
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("val.de.gz", REPACKED),  # whoever packs it
        ("val.de.gz", TEXT),  # as a browser saves it that unpacks what it downloads
        ("val.de", TEXT.replace(b"\n", b"\r\n")),  # unpacked on Windows
    ],
)
def test_the_files_are_read_as_people_have_them(tmp_path, monkeypatch, folder, name, data):
    """`~` too, which a shell leaves in `MULTI30K_DIR="~/captions"`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MULTI30K_DIR", "~/captions")
    path = tmp_path / "captions" / folder / name
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    assert multi30k_text("val.de") == TEXT


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        ({}, FileNotFoundError, "MULTI30K_DIR.*has neither val.de.gz nor val.de: name the folder"),
        (None, FileNotFoundError, "MULTI30K_DIR.*has neither"),
        ({"val.de.gz": gzip.compress(b"A dog.")}, ValueError, "val.de.gz.*SHA-256.*fetch it again"),
        ({"val.de.gz": REPACKED[:-9]}, ValueError, "damaged"),
        ({"val.de.gz": REPACKED[:12] + b"?" + REPACKED[13:]}, ValueError, "damaged"),
    ],
)
def test_a_broken_file_says_so_in_one_line(tmp_path, monkeypatch, data, error, says):
    folder = tmp_path / "captions"
    monkeypatch.setenv("MULTI30K_DIR", str(folder))
    folder.touch() if data is None else folder.mkdir()
    for name, content in (data or {}).items():
        (folder / name).write_bytes(content)
    with pytest.raises(error, match=says) as refusal:
        multi30k_text("val.de")
    assert "\n" not in str(refusal.value)


def test_only_a_newline_separates_lines(monkeypatch):
    text = "a\u2028b\x85c\x0cd\n e\r\n"
    monkeypatch.setattr(files, "multi30k_text", lambda name: text.encode())
    assert read_lines("val.de") == ["a\u2028b\x85c\x0cd", "e"]


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A web server on this machine that serves one file, and `multi30k_file` pointed at it."""
    served = {"data": REPACKED, "requests": 0}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            served["requests"] += 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(served["data"])))
            self.end_headers()
            self.wfile.write(served["data"])

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("MULTI30K_DIR", raising=False)
    monkeypatch.setattr(files, "MULTI30K_URL", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
    yield served
    server.shutdown()
    server.server_close()


def test_a_download_is_checked_and_kept(host, tmp_path):
    assert read_lines("val.de") == ["Ein Hund rennt."] == read_lines("val.de")
    assert host["requests"] == 1
    (cached,) = tmp_path.rglob("val.de.gz")
    cached.write_bytes(b"damaged on the disk")
    assert multi30k_text("val.de") == TEXT and host["requests"] == 2


def test_a_damaged_download_is_tried_again_and_then_refused(host, tmp_path):
    host["data"] = REPACKED[:-5] + b"12345"
    with pytest.raises(FileNotFoundError, match="a whole val.de.gz.*MULTI30K_DIR"):
        multi30k_text("val.de")
    assert host["requests"] == 4 and not [*tmp_path.rglob("val.de*")]


def test_what_to_do_without_a_network_or_a_cache(host, tmp_path, monkeypatch):
    (tmp_path / "cache").touch()  # a file where the folder would be; root may write in any folder
    with pytest.raises(FileNotFoundError, match="cache.*folder be written.*MULTI30K_DIR"):
        multi30k_text("val.de")
    assert host["requests"] == 0
    (tmp_path / "cache").unlink()
    monkeypatch.setattr(files, "MULTI30K_URL", "http://127.0.0.1:9/")  # nothing listens there
    with pytest.raises(FileNotFoundError, match="go online.*MULTI30K_DIR.*sample"):
        multi30k_text("val.de")
