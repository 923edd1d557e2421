"""Multi30k's files: for each way in which they can be broken, one line says what to do."""

import gzip
import hashlib
import http.server
import threading

import pooch
import pytest

from scripts.corpora import multi30k as files
from scripts.corpora.load import load_corpus
from scripts.corpora.multi30k import multi30k_file, read_lines


def test_load_corpus_refuses_an_unknown_name():
    with pytest.raises(ValueError, match="choose sample or multi30k"):
        load_corpus("wmt14")


@pytest.mark.parametrize(
    ("name", "data", "error", "says"),
    [
        ("train.de.gz", None, FileNotFoundError, "train.de.gz.*MULTI30K_DIR"),
        ("val.en.gz", gzip.compress(b"A dog.", mtime=0), ValueError, "SHA-256.*fetch it again"),
    ],
)
def test_a_broken_file_says_so_in_one_line(tmp_path, monkeypatch, name, data, error, says):
    monkeypatch.setenv("MULTI30K_DIR", str(tmp_path))
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(error, match=says) as found:
        multi30k_file(name)
    assert "\n" not in str(found.value)


def test_only_a_newline_separates_lines(tmp_path, monkeypatch):
    text = "a\u2028b\x85c\x0cd\n e\r\n"
    (tmp_path / "text.gz").write_bytes(gzip.compress(text.encode()))
    monkeypatch.setattr(files, "multi30k_file", tmp_path.joinpath)
    assert read_lines("text.gz") == ["a\u2028b\x85c\x0cd", "e"]
    assert len(text.splitlines()) == 5  # the wrong way: it would shift every later pair


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A web server on this machine that serves one file, and `multi30k_file` pointed at it."""
    content = gzip.compress(b"Ein Hund rennt.\n", mtime=0)
    served = {"data": content, "requests": 0}

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
    monkeypatch.setitem(files.MULTI30K_SHA256, "val.de.gz", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
    yield served
    server.shutdown()
    server.server_close()


def test_a_download_is_checked_and_kept(host):
    path = multi30k_file("val.de.gz")
    assert read_lines("val.de.gz") == ["Ein Hund rennt."]
    assert multi30k_file("val.de.gz") == path and host["requests"] == 1


def test_a_damaged_download_is_tried_again_and_then_refused(host):
    host["data"] = host["data"][:-5] + b"12345"
    with pytest.raises(ValueError, match="damaged.*MULTI30K_DIR"):
        multi30k_file("val.de.gz")
    assert host["requests"] == 4


def test_offline_says_what_to_do(host, monkeypatch):
    monkeypatch.setattr(files, "MULTI30K_URL", "http://127.0.0.1:9/")  # nothing listens there
    with pytest.raises(FileNotFoundError, match="go online.*MULTI30K_DIR.*sample"):
        multi30k_file("val.de.gz")
