"""Shards on HTTP servers as they are: with logins, signed addresses, redirects and certificates."""

import base64
import gzip
import os
import re
import shutil
import ssl
import subprocess
import time
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from harness.shard_rows import rows
from harness.shard_server import running

from trainer import ConfigError, ShardedDataset
from trainer.shards import download
from trainer.shards.__main__ import write_shards

LOGIN = "Basic " + base64.b64encode("me:p@ß".encode()).decode()
QUERY = "sig=a%2Fb+c&end=1/"


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        server = self.server
        server.asked.append((self.path, self.headers.get("Authorization")))
        parts = urlsplit(self.path)
        if server.login and self.headers.get("Authorization") != server.login:
            self.send_error(401)
            return
        if server.query and (parts.query != server.query or "//" in parts.path):
            self.send_error(403)
            return
        if server.to:
            self.send_response(302)
            self.send_header("Location", server.to + self.path)
            self.end_headers()
            return
        path = Path(server.folder + unquote(parts.path))
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        self.send_response(200)
        if server.is_packed:
            data = gzip.compress(data)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", server.length or str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(folder, login="", query="", to="", length="", is_packed=False, certificate=None):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.folder = str(folder)
    server.asked = []
    server.login, server.query, server.to = login, query, to
    server.length, server.is_packed = length, is_packed
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.place = f"127.0.0.1:{server.server_port}"
    with running(server):
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("http")
    write_shards(rows(20), str(place / "a ß"), 600, 0)
    return place


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(download, "FIRST_DELAY_S", 0.01)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))


def check(url):
    found, data = ShardedDataset(url), rows(20)
    assert all(found[index][0].equal(data[index][0]) for index in range(20))
    return found.source


def test_a_login_in_the_address_is_sent_and_not_shown(folder):
    with serving(folder, login=LOGIN) as server:
        assert "@" not in check(f"http://me:p%40%C3%9F@{server.place}/a%20%C3%9F")
        with pytest.raises(ConfigError, match=r"HTTP 401 .*check the credentials") as caught:
            ShardedDataset(f"http://me:secret@{server.place}/a%20%C3%9F")
    assert "secret" not in str(caught.value)


def test_a_login_is_not_sent_to_the_server_of_a_redirect(folder):
    with serving(folder) as other, serving(folder, LOGIN, to=f"http://{other.place}") as server:
        check(f"http://me:p%40%C3%9F@{server.place}/a%20%C3%9F")
        assert {login for _, login in other.asked} == {None}


@pytest.mark.parametrize("end", ["", "/"])
def test_the_query_of_a_signed_address_is_sent_as_it_is_and_not_shown(end, folder):
    with serving(folder, query=QUERY) as server:
        assert "sig=" not in check(f"http://{server.place}/a%20%C3%9F{end}?{QUERY}")
        with pytest.raises(ConfigError, match=r"HTTP 403 .*check the credentials") as caught:
            ShardedDataset(f"http://{server.place}/a%20%C3%9F?sig=other")
    assert "sig=" not in str(caught.value)


def test_an_address_may_have_letters_that_are_not_encoded_and_a_scheme_in_capitals(folder):
    with serving(folder) as server:
        check(f"HTTP://{server.place}/a ß")


@pytest.mark.parametrize(
    "address", ["http:///a", "http://h:99999/a", "http://me:secret@[::1:8/a?k"]
)
def test_an_address_that_cannot_be_one_is_refused_at_once(address):
    with pytest.raises(ConfigError, match=r"http://\S*: .*; must be an address") as caught:
        ShardedDataset(address)
    assert not re.search(r"secret|\?k", str(caught.value))


def test_an_unknown_certificate_is_refused_at_once(folder, tmp_path, monkeypatch):
    if not shutil.which("openssl"):
        pytest.skip("needs openssl")
    own = str(tmp_path / "own.pem")
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", own, "-out", f"{own}.crt"]
    subprocess.run(words, check=True, capture_output=True)
    with open(own, "a") as file:
        file.write(Path(f"{own}.crt").read_text())
    with serving(folder, certificate=own) as server:
        url = f"https://{server.place}/a%20%C3%9F"
        monkeypatch.setattr(time, "sleep", None)  # no second try
        with pytest.raises(ConfigError, match=r"CERTIFICATE_VERIFY_FAILED.*SSL_CERT_FILE"):
            ShardedDataset(url)
        monkeypatch.setitem(os.environ, "SSL_CERT_FILE", own)
        check(url)


def test_a_server_that_compresses_what_it_sends_is_named(folder):
    with (
        serving(folder, is_packed=True) as server,
        pytest.raises(ConfigError, match=r"the server sends it with Content-Encoding: gzip"),
    ):
        ShardedDataset(f"http://{server.place}/a%20%C3%9F")


def test_a_length_that_is_no_number_is_ignored(folder):
    with serving(folder, length="many") as server:
        check(f"http://{server.place}/a%20%C3%9F")
