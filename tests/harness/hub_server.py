"""A server that answers as the hub of Hugging Face does: repositories of models, from folders."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from harness.shard_server import running

API = "/api/models"


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        url = urlsplit(self.path)
        path = unquote(url.path)
        with self.server.lock:
            self.server.asked.append(f"{self.command} {path}")
        if self.server.status:
            self._answer(b"", self.server.status)
        elif path == API:
            author = parse_qs(url.query).get("author", [""])[0]
            found = [name for name in self.server.folders if name.startswith(f"{author}/")]
            self._json([{"id": name} for name in found])
        elif path.startswith(f"{API}/"):
            self._tell(path.removeprefix(f"{API}/"))
        else:
            name, _, rest = path[1:].partition("/resolve/")
            if self._is_open(name):
                revision, _, file = rest.partition("/")
                self._send_file(name, revision, file)

    def _is_open(self, name):
        """Answer with the error that the hub has for a repository that is not there or closed."""
        is_known = name in self.server.folders
        if not is_known:
            self._error(401, "", "Invalid username or password.")
        elif name in self.server.gated:
            self._error(401, "GatedRepo", f"Access to model {name} is restricted.")
        return is_known and name not in self.server.gated

    def _tell(self, path):
        name, _, rest = path.partition("/revision/")
        name, _, tree = name.partition("/tree/")
        if name not in self.server.gated and not self._is_open(name):
            return  # the list of files of a gated one is open
        revision = rest or tree or "main"
        key = self._find(name, revision)
        if key is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        files = files_of(self.server.folders[key])
        if tree:
            kinds = [
                {"type": "file", "path": file, "size": path.stat().st_size, "oid": etag_of(path)}
                for file, path in files.items()
            ]
            self._json(kinds)
            return
        siblings = [{"rfilename": file} for file in files]
        self._json({"id": name, "sha": commit_of(key), "siblings": siblings, "private": False})

    def _find(self, name, revision):
        """Return the name of the folder of a revision, a name or a commit, or None."""
        others = [key for key in self.server.folders if key.startswith(f"{name}@")]
        revisions = {"main": name, commit_of(name): name}
        revisions |= {key.partition("@")[2]: key for key in others}
        revisions |= {commit_of(key): key for key in others}
        return revisions.get(revision)

    def _send_file(self, name, revision, file):
        key = self._find(name, revision)
        path = files_of(self.server.folders[key]).get(file) if key else None
        if path is None:
            self._error(404, "EntryNotFound", "Entry not found")
            return
        headers = {"X-Repo-Commit": commit_of(key), "ETag": f'"{etag_of(path)}"'}
        self._answer(path.read_bytes(), 200, headers)

    def _error(self, status, code, text):
        headers = {"X-Error-Message": text} | ({"X-Error-Code": code} if code else {})
        self._answer(json.dumps({"error": text}).encode(), status, headers)

    def _json(self, content):
        self._answer(json.dumps(content).encode(), 200, {"Content-Type": "application/json"})

    def _answer(self, data, status, headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def files_of(folder):
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}


def commit_of(name):
    return hashlib.sha1(name.encode()).hexdigest()


def etag_of(path):
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def serving_hub(**folders):
    """Serve folders as repositories of `hub/NAME`, or revisions of them, `NAME@REVISION`.

    `server.url` is for HF_ENDPOINT.

    `server.asked` are the requests. Names in `server.gated` are closed. With `server.status` each
    answer is that.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    server.daemon_threads = True
    server.lock = threading.Lock()
    server.folders = {f"hub/{name}": folder for name, folder in folders.items()}
    server.gated = set()
    server.status = 0
    server.asked = []
    server.url = f"http://127.0.0.1:{server.server_port}"
    with running(server):
        yield server


def use_hub(url, home, set_attribute, is_offline=False):
    """Let huggingface_hub, which reads the environment at import, use a server and a cache."""
    from huggingface_hub import constants

    values = {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_HUB_OFFLINE": is_offline,
    }
    for name, value in values.items():
        set_attribute(constants, name, value)
