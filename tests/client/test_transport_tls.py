"""TLS read through memory, and HTTP proxies."""
from __future__ import annotations

import base64
import contextlib
import datetime
import ipaddress
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from bench.client.dialing import proxy_from_env
from bench.client.errors import ChannelError
from bench.client.kernel_time import stamps_supported
from bench.client.outcome import Outcome
from bench.client.transport import Transport, TransportOptions
from tests.client import fake_server as fake
from tests.client import test_transport

ask, transport, FakeServer = test_transport.ask, test_transport.transport, fake.FakeServer


def _certificate(name: str, issuer: tuple[x509.Name, Any] | None) -> tuple[x509.Certificate, Any]:
    """A certificate for localhost and 127.0.0.1, signed by the issuer or by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    issuer_name, issuer_key = issuer or (subject, key)
    builder = (x509.CertificateBuilder().subject_name(subject).issuer_name(issuer_name).public_key(key.public_key())
               .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
               .not_valid_after(now + datetime.timedelta(days=2))
               .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
               .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
               .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
                              critical=False)
               .add_extension(x509.KeyUsage(True, False, False, False, False, issuer is None, issuer is None, False,
                                            False), critical=True))
    if issuer is not None:
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuer_key, hashes.SHA256()), key


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A server context, the file of its authority, and the file of another authority."""
    folder = tmp_path_factory.mktemp("tls")
    files = {}
    ca, ca_key = _certificate("test authority", None)
    other, _ = _certificate("another authority", None)
    leaf, leaf_key = _certificate("test server", (ca.subject, ca_key))
    for name, certificate in (("ca", ca), ("other", other), ("leaf", leaf)):
        files[name] = folder / f"{name}.pem"
        files[name].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files["key"] = folder / "key.pem"
    files["key"].write_bytes(leaf_key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                                    serialization.NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["leaf"], files["key"])
    return {"context": context, "ca": str(files["ca"]), "other": str(files["other"])}


def good(peer: Any) -> None:
    peer.send(fake.whole())


@pytest.mark.parametrize("read", ["prompt", "lazy"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_good_answer_over_tls(tls: dict[str, Any], read: str, version: ssl.TLSVersion) -> None:
    context = tls["context"]
    context.minimum_version = context.maximum_version = version
    names: list[str | None] = []
    context.sni_callback = lambda sock, name, ctx: names.append(name)

    def script(peer: Any) -> None:
        peer.send(fake.HEAD + fake.chunk(fake.EVENT))
        threading.Event().wait(0.05)
        peer.send(fake.whole()[len(fake.HEAD):])

    try:
        with FakeServer(script, context=context) as server, \
                transport(f"https://localhost:{server.port}/v1", ca_file=tls["ca"], read=read) as made:
            first, second = ask(made, n=2)
            assert names == ["localhost"] and server.connections == 1
    finally:
        context.sni_callback = None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_3
    assert (first.status, second.status, second.output_tokens) == ("ok", "ok", 3)
    assert first.connection == "new" and first.tls_s > 0.0 and first.connect_s > 0.0
    assert second.connection == "reused" and second.tls_s is None
    assert first.clock == ("kernel" if stamps_supported() else "user")
    assert 0.04 < first.last_token_at - first.first_token_at < 1.0


def test_the_address_in_the_certificate_counts(tls: dict[str, Any]) -> None:
    with FakeServer(good, context=tls["context"]) as server, transport(server.url, ca_file=tls["ca"]) as made:
        assert ask(made)[0].status == "ok"


@pytest.mark.parametrize("which", ["other authority", "system authorities", "other name"])
def test_certificates_that_are_not_accepted(tls: dict[str, Any], which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ca_file = {"other authority": tls["other"], "system authorities": None, "other name": tls["ca"]}[which]
    with FakeServer(good, context=tls["context"]) as server:
        url = server.url
        if which == "other name":
            url = f"https://elsewhere.test:{server.port}/v1"
            monkeypatch.setattr("gevent.socket.getaddrinfo", lambda *a, **k: [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", server.port))])
        with transport(url, ca_file=ca_file) as made:
            (outcome,) = ask(made)
        assert (outcome.status, outcome.code) == ("error", "CH-TLS-CERT")
        assert outcome.send_at is None and server.requests == []


def test_verification_can_be_switched_off(tls: dict[str, Any]) -> None:
    with FakeServer(good, context=tls["context"]) as server, transport(server.url, tls_verify=False) as made:
        assert ask(made)[0].status == "ok"


def test_tls_to_a_server_that_speaks_plain_http() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        sock, _ = listener.accept()
        sock.recv(1000)
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        sock.close()

    threading.Thread(target=serve, daemon=True).start()
    with transport(f"https://127.0.0.1:{listener.getsockname()[1]}/v1") as made:
        assert ask(made)[0].code == "CH-TLS"
    listener.close()


def test_a_cut_inside_a_tls_answer(tls: dict[str, Any]) -> None:
    def script(peer: Any) -> None:
        peer.send(fake.HEAD + fake.chunk(fake.EVENT))
        peer.sock.shutdown(socket.SHUT_RDWR)

    with FakeServer(script, context=tls["context"]) as server, transport(server.url, ca_file=tls["ca"]) as made:
        assert ask(made)[0].status == "truncated"


def test_a_large_request_to_a_slow_reader(tls: dict[str, Any]) -> None:
    """Session tickets are readable while we still write; they are no answer."""
    with FakeServer(good, context=tls["context"], pause_s=0.15) as server, \
            transport(server.url, ca_file=tls["ca"]) as made:
        (outcome,) = ask(made, body=b"x" * 12_000_000)
        assert outcome.status == "ok" and len(server.requests[0][1]) == 12_000_000


def test_a_ca_file_that_is_none(tmp_path: Path) -> None:
    for name, text in (("missing.pem", None), ("empty.pem", ""), ("text.pem", "no certificate")):
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        with pytest.raises(ChannelError) as caught, transport("https://127.0.0.1:1/v1", ca_file=str(path)):
            pass
        assert caught.value.code == "CH-TLS"


# Proxies.

class Proxy(FakeServer):
    """Answers absolute-form requests itself; tunnels CONNECT to the port it is told."""

    def __init__(self, port: int, refuse: bytes | None = None) -> None:
        self.seen: list[bytes] = []

        def script(peer: Any) -> None:
            self.seen.append(peer.head)
            if refuse is not None:
                peer.send(b"HTTP/1.1 " + refuse + b"\r\nContent-Length: 0\r\n\r\n")
            elif peer.head.startswith(b"CONNECT "):
                peer.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
                upstream = socket.create_connection(("127.0.0.1", port))
                back = threading.Thread(target=_pump, args=(upstream, peer.sock), daemon=True)
                back.start()
                _pump(peer.sock, upstream)
            else:
                good(peer)

        super().__init__(script)
        self.url = f"http://user:p%40ss@127.0.0.1:{self.port}"


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


LOGIN = b"Proxy-Authorization: Basic " + base64.b64encode(b"user:p@ss")


def test_plain_http_through_a_proxy() -> None:
    with Proxy(0) as proxy, transport("http://service.test/v1", proxy=proxy.url) as made:
        outcomes = ask(made, n=2)
        assert [o.status for o in outcomes] == ["ok", "ok"]
        lines = proxy.seen[0].split(b"\r\n")
    assert lines[0] == b"POST http://service.test/v1/chat/completions HTTP/1.1"
    assert b"Host: service.test" in lines and LOGIN in lines


def test_tls_through_a_proxy(tls: dict[str, Any]) -> None:
    with FakeServer(good, context=tls["context"]) as server, Proxy(server.port) as proxy, \
            transport(f"https://localhost:{server.port}/v1", key="sk-1", ca_file=tls["ca"], proxy=proxy.url) as made:
        outcomes = ask(made, n=2)
        assert [(o.status, o.connection) for o in outcomes] == [("ok", "new"), ("ok", "reused")]
        assert proxy.seen[0].split(b"\r\n")[0] == f"CONNECT localhost:{server.port} HTTP/1.1".encode()
        assert LOGIN in proxy.seen[0] and b"sk-1" not in proxy.seen[0]
        assert LOGIN not in server.requests[0][0]
        assert server.requests[0][0].startswith(b"POST /v1/chat/completions ")


@pytest.mark.parametrize(("answer", "code"), [(b"407 Login", "CH-407"), (b"502 Bad Gateway", "CH-PROXY"),
                                              (b"403 No", "CH-PROXY")])
def test_a_proxy_that_refuses_the_tunnel(answer: bytes, code: str) -> None:
    with Proxy(0, refuse=answer) as proxy, transport("https://service.test/v1", proxy=proxy.url) as made:
        outcome: Outcome = ask(made)[0]
        assert (outcome.status, outcome.code) == ("error", code)


def test_a_proxy_that_is_not_there() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    for url in ("http://service.test/v1", "https://service.test/v1"):
        with transport(url, proxy=f"127.0.0.1:{port}") as made:
            assert ask(made)[0].code == "CH-PROXY"


def test_a_proxy_address_that_cannot_be_used() -> None:
    with pytest.raises(ChannelError) as caught, transport("http://service.test/v1", proxy="socks5://127.0.0.1:1"):
        pass
    assert caught.value.code == "CH-PROXY"


def test_the_environment_is_asked_only_by_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY",
                 "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert proxy_from_env("https", "service.test") is None
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "localhost,.inside.test")
    assert proxy_from_env("https", "service.test") == "http://127.0.0.1:9"
    assert proxy_from_env("http", "service.test") is None
    assert proxy_from_env("https", "a.inside.test") is None
    with FakeServer(good) as server:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.delenv("no_proxy")
        with transport(server.url) as made:  # not asked: the environment has no say
            assert ask(made)[0].status == "ok"
        assert isinstance(made, Transport) and TransportOptions().proxy is None
