"""Progress of a TrainJob (KEP-2779): posted over HTTPS, beside the loop, and without the token."""

import datetime
import ipaddress
import json
import ssl
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from harness import fit_on

from trainer.places import kubeflow

WORDS = ["task=tiny", "run.steps=20", "log.every_steps=4", "eval.every_steps=8"]
TOKEN = "eyJhbGciOiJSUzI1NiJ9.c2VjcmV0.c2lnbmF0dXJl"
PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/a/trainjobs/b/status"


class Server(ThreadingHTTPServer):
    """A server of Kubeflow that answers with `code` after `slow_s`; `posts` has what came."""

    daemon_threads = True
    code = 200
    slow_s = 0.0

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Taking)
        self.posts = []

    def handle_error(self, request, client_address):
        """Say nothing: clients refuse the certificate."""


class _Taking(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posts.append((self.path, self.headers["Authorization"], json.loads(body)))
        time.sleep(self.server.slow_s)
        self.send_response(self.server.code)
        self.send_header("Location", "https://127.0.0.1:1/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        """Say nothing."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Return a folder with the certificate of an authority, and one by it for 127.0.0.1."""
    pytest.importorskip("cryptography", reason="cryptography is not installed")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = tmp_path_factory.mktemp("certificates")
    now = datetime.datetime.now(datetime.timezone.utc)
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("ca", "server")}
    named = {n: x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, n)]) for n in keys}
    for name, key in keys.items():
        made = x509.CertificateBuilder(issuer_name=named["ca"], subject_name=named[name])
        made = made.public_key(key.public_key()).serial_number(x509.random_serial_number())
        made = made.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
        constraints = x509.BasicConstraints(ca=name == "ca", path_length=None)
        made = made.add_extension(constraints, critical=True)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        made = made.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        signed = made.sign(keys["ca"], hashes.SHA256())
        pem = serialization.Encoding.PEM
        secret = key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (folder / f"{name}.pem").write_bytes(signed.public_bytes(pem) + secret)
    return folder


@pytest.fixture
def server(certificates, tmp_path, monkeypatch):
    """Yield a server, whose variables are set as in a pod of a TrainJob."""
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    monkeypatch.setattr(kubeflow, "POST_EVERY_S", 0.05)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(certificates / "ca.pem"))
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    with serving(certificates) as server:
        url = f"https://127.0.0.1:{server.server_port}{PATH}"
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", url)
        yield server


@contextmanager
def serving(certificates):
    with Server() as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates / "server.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_a_trainjob_hears_of_progress_metrics_and_the_end(server, tmp_path, capfd):
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed"
    )
    run = fit_on(2, tmp_path / "runs", *WORDS)
    assert len(server.posts) >= 2
    shown = []
    for path, login, body in server.posts:
        assert (path, login) == (PATH, f"Bearer {TOKEN}")
        status = models.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body).trainer_status
        assert status.last_updated_time is not None
        shown.append(status.progress_percentage)
    assert shown == sorted(shown) and shown[-1] == 100 and shown.count(100) == 1
    assert status.estimated_remaining_seconds == 0
    last = {metric.name: metric.value for metric in status.metrics}
    assert (last["current_step"], last["total_steps"]) == ("20", "20")
    assert float(last["eval/loss"]) == run["record"][-1]["eval/loss"]
    written = [p.read_bytes() for p in (tmp_path / "runs").rglob("*") if p.is_file()]
    assert not [data for data in written if TOKEN.encode() in data]
    assert TOKEN not in "".join(capfd.readouterr())


@pytest.mark.parametrize("code", [503, 302])
def test_a_server_that_refuses_is_told_once_and_the_run_goes_on(code, server, tmp_path, capfd):
    server.code = code
    run = fit_on(1, tmp_path / "one", *WORDS)
    said = capfd.readouterr().out
    line = f"warning: KUBEFLOW_TRAINER_SERVER_URL: it answers {code}; the run goes on"
    assert said.count("KUBEFLOW") == 1 and line in said and TOKEN not in said
    assert run["code"] == 0 and len(server.posts) >= 1


def test_a_slow_server_does_not_hold_the_loop(server, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(kubeflow, "POST_S", 0.5)
    server.slow_s = 2.0
    begun = time.monotonic()
    assert fit_on(1, tmp_path / "runs", *WORDS, "run.steps=200")["code"] == 0
    assert time.monotonic() - begun < 20  # each of 200 steps would wait 0.5 s
    assert capfd.readouterr().out.count("KUBEFLOW") == 1 and len(server.posts) < 20


def test_a_server_that_is_not_the_one_of_the_authority_gets_no_token(
    server, tmp_path, monkeypatch, capfd, certificates
):
    other = certificates / "server.pem"
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(other))
    fit_on(1, tmp_path / "one", *WORDS)
    assert server.posts == [] and "CERTIFICATE_VERIFY_FAILED" in capfd.readouterr().out
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{server.server_port}")
    fit_on(1, tmp_path / "two", *WORDS)
    line = "warning: KUBEFLOW_TRAINER_SERVER_URL: must be an address, as in https://host/status; "
    assert line in capfd.readouterr().out


@pytest.mark.parametrize("content", ["two words", "", "a\nb"])
def test_a_file_without_a_token_is_told_without_its_content(content, server, tmp_path, capfd):
    (tmp_path / "token").write_text(content)
    fit_on(1, tmp_path / "runs", *WORDS)
    said = capfd.readouterr().out
    assert (
        "warning: KUBEFLOW_TRAINER_SERVER_TOKEN: must be a file with a token; the run goes on"
        in said
    )
    assert "two words" not in said and server.posts == []


def test_it_can_be_turned_off(server, tmp_path, monkeypatch):
    fit_on(1, tmp_path / "one", *WORDS, "log.trackers=[]")
    monkeypatch.setenv("DISABLE_KUBEFLOW_INTEGRATION", "true")
    fit_on(1, tmp_path / "two", *WORDS)
    assert server.posts == []
