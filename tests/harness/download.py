"""An archive of two files, and a server that sends it completely or in part."""

import hashlib
import io
import os
import tarfile
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FILES = {"one.bin": os.urandom(300_000), "two.bin": b"second"}
SHA256 = {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}
KEY = "task.options.data=download"


def packed(files):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"folder/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


ARCHIVE = packed({"readme.html": b"read me", **FILES})


class Server(ThreadingHTTPServer):
    daemon_threads = False  # close() waits for unfinished responses


@contextmanager
def serving(body, status=200, length=None, before=lambda: None, amid=lambda: None):
    """Run a server that answers with `body`; yield its address and the requested paths."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            before()
            with suppress(OSError):  # the client may have disconnected
                self.send_response(status)
                self.send_header("Content-Length", str(length or len(body)))
                self.end_headers()
                self.wfile.write(body[: len(body) // 2])
                amid()
                self.wfile.write(body[len(body) // 2 :])

        def log_message(self, *arguments):
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/all.tar.gz", asked
        finally:
            server.shutdown()
            thread.join()


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())
