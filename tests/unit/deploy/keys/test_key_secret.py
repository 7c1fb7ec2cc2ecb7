"""`baton keys secret` creates one Secret once and never changes it. The API server is a stand-in over TLS."""

import base64
import datetime
import ipaddress
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from baton.cluster.security.keyring import PEERS, read_key, read_peers
from baton.deploy.keys import keys
from baton.tests.meta.kubernetes.manifests import validate
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

TOKEN = "a-token-of-the-account"
ROLES = ("router", "prefill", "decode")


def certificate(folder):
    """A key and a certificate of 127.0.0.1 that is its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "api")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "key.pem").write_bytes(key.private_bytes(pem, pkcs8, plain))
    (folder / "ca.crt").write_bytes(made.public_bytes(pem))


class ApiServer(HTTPServer):
    """Creates Secrets as Kubernetes does, for the one account; `refusal` answers everybody instead."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.secrets = {}
        self.methods = []
        self.refusal = None


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.methods.append(self.command)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = body["metadata"]["name"]
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.answer(401, {"reason": "Unauthorized", "message": "Unauthorized"})
        if self.server.refusal:
            return self.answer(*self.server.refusal)
        if self.path != "/api/v1/namespaces/serving/secrets":
            return self.answer(404, {"reason": "NotFound", "message": self.path})
        if name in self.server.secrets:
            return self.answer(
                409, {"reason": "AlreadyExists", "message": f'secrets "{name}" already exists'}
            )
        self.server.secrets[name] = body
        return self.answer(201, body)

    do_PUT = do_PATCH = do_GET = do_DELETE = lambda self: self.server.methods.append(self.command)

    def answer(self, code, body):
        payload = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def account(tmp_path_factory):
    folder = tmp_path_factory.mktemp("account")
    certificate(folder)
    (folder / "token").write_text(f"{TOKEN}\n")
    (folder / "namespace").write_text("serving")
    return folder


@pytest.fixture
def server(account, monkeypatch):
    api = ApiServer()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(account / "ca.crt", account / "key.pem")
    api.socket = context.wrap_socket(api.socket, server_side=True)
    thread = threading.Thread(target=api.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT_HTTPS", str(api.server_port))
    yield api
    api.shutdown()
    api.server_close()
    thread.join()


def secret(account, capsys, *words):
    code = keys.main(["secret", *(words or ["baton-keys"]), "--account", str(account)])
    return code, capsys.readouterr()


def test_the_secret_holds_a_key_of_each_role_and_the_list_that_admits_them(account, server, capsys, tmp_path):
    code, said = secret(account, capsys)
    assert (code, said.out) == (0, "secret serving/baton-keys: made, with keys of router, prefill, decode\n")
    made = server.secrets["baton-keys"]
    validate(made)
    assert sorted(made["data"]) == sorted([PEERS, *(f"{role}.key" for role in ROLES)])
    for name, data in made["data"].items():
        (tmp_path / name).write_bytes(base64.b64decode(data))
        (tmp_path / name).chmod(0o600)
    assert {peer.public for peer in read_peers(tmp_path)} == {
        read_key(tmp_path, role).public for role in ROLES
    }


def test_keys_that_exist_are_left_alone_however_often_it_runs(account, server, capsys):
    secret(account, capsys)
    before = json.dumps(server.secrets)
    for _ in range(2):
        code, said = secret(account, capsys)
        assert (code, said.out) == (0, "secret serving/baton-keys: exists, and was left as it is\n")
    assert json.dumps(server.secrets) == before
    assert set(server.methods) == {"POST"}


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ((403, {"reason": "Forbidden", "message": "secrets is forbidden"}), "needs the verb create"),
        (
            (409, {"reason": "Conflict", "message": "namespace is being terminated"}),
            "409: namespace is being terminated",
        ),
        ((500, ["no status"]), "500: no reason given"),
    ],
)
def test_an_unexpected_answer_is_a_failure_with_its_reason(refusal, said, account, server, capsys):
    server.refusal = refusal
    code, seen = secret(account, capsys)
    assert code == 1
    assert said in seen.err
    assert TOKEN not in seen.err


def test_a_server_of_another_authority_is_not_told_the_keys(account, server, capsys, tmp_path):
    for name in ("token", "namespace"):
        (tmp_path / name).write_bytes((account / name).read_bytes())
    certificate(tmp_path)
    code, said = secret(tmp_path, capsys)
    assert code == 1
    assert "does not answer" in said.err
    assert server.secrets == {}


def test_outside_a_cluster_the_error_names_the_remedy(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    code, said = secret(tmp_path, capsys)
    assert code == 2
    assert "baton keys init" in said.err
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    code, said = secret(tmp_path, capsys)
    assert code == 2
    assert "no service account" in said.err


@pytest.mark.parametrize("name", ["Keys", "a/b", "", "a" * 64])
def test_a_name_that_no_secret_can_have_is_refused(name, tmp_path, capsys):
    code, said = secret(tmp_path, capsys, name)
    assert code == 2
    assert "is no name of a Secret" in said.err
