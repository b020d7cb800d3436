"""What an S3 store's faults are to us: a real server, and a proxy before it that cuts, lies, refuses and hangs."""

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from uuid import uuid4

import pytest
from typing_extensions import override
from urllib3.connectionpool import HTTPConnectionPool
from urllib3.exceptions import InsecureRequestWarning, MaxRetryError, SSLError

from infinilora.protocol.errors import InfiniLoraError, InvalidRequest, StoreFull, StoreRefused, Unavailable
from infinilora.runtime.blob_store import BlobStore, Changed
from infinilora.runtime.blobs import S3Blobs, open_blobs
from infinilora.runtime.credentials import Credentials
from infinilora.runtime.s3_blobs import S3Place
from infinilora.runtime.s3_errors import store_errors
from support.procs import TLS, TlsWeedServer, WeedServer
from support.s3_proxy import Fault, S3Proxy

pytestmark = pytest.mark.integration

DATA = bytes(range(256)) * 40


@pytest.fixture
def proxy(s3_server: WeedServer) -> Iterator[S3Proxy]:
    with S3Proxy(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def bucket() -> str:
    return f"secret-bucket-{uuid4().hex[:8]}"


@pytest.fixture
def blobs(proxy: S3Proxy, s3_server: WeedServer, bucket: str) -> BlobStore:
    blobs = _opened(proxy, s3_server, bucket)
    blobs.put("tenant/x", DATA)
    proxy.seen.clear()
    return blobs


def _opened(proxy: S3Proxy, server: WeedServer, bucket: str, *, read_s: float = 5.0) -> S3Blobs:
    place = S3Place(bucket=bucket, endpoint=proxy.endpoint)
    return S3Blobs(place, Credentials(access_key=server.access_key, secret_key=server.secret_key), read_s=read_s)


def _says_nothing_of(error: BaseException, *secrets: str) -> bool:
    return not any(secret in str(error) for secret in ("127.0.0.1", "tenant/x", "Signature=", *secrets))


def test_an_answer_cut_in_the_middle_is_unavailable_and_the_next_one_right(blobs: BlobStore, proxy: S3Proxy) -> None:
    proxy.fault(Fault(cut_after=100), times=2)
    with pytest.raises(Unavailable):
        blobs.get("tenant/x")
    with pytest.raises(Unavailable):
        blobs.get_range("tenant/x", 0, 1000)
    assert blobs.get("tenant/x") == DATA


@pytest.mark.parametrize("length", ["200", "20000"])
def test_a_wrong_content_length_never_passes_for_the_object(blobs: BlobStore, proxy: S3Proxy, length: str) -> None:
    proxy.fault(Fault(headers={"Content-Length": length}), times=2)
    with pytest.raises(Unavailable):
        blobs.get_range("tenant/x", 0, 1000)
    if length == "20000":
        with pytest.raises(Unavailable):
            blobs.get("tenant/x")


def test_a_range_that_was_not_asked_for_is_refused(blobs: BlobStore, proxy: S3Proxy) -> None:
    proxy.fault(Fault(headers={"Content-Range": f"bytes 10-109/{len(DATA)}"}))
    with pytest.raises(Unavailable, match="wanted 100 bytes from 0"):
        blobs.get_range("tenant/x", 0, 100)


def test_another_etag_in_the_middle_is_changed(blobs: BlobStore, proxy: S3Proxy) -> None:
    stat = blobs.stat("tenant/x")
    assert stat is not None
    assert blobs.get_range("tenant/x", 0, 10, etag=stat.etag) == DATA[:10]
    proxy.fault(Fault(headers={"ETag": '"another"'}))
    with pytest.raises(Changed):
        blobs.get_range("tenant/x", 10, 10, etag=stat.etag)
    assert proxy.asked("GET", "tenant/x")[0].headers["if-match"] == f'"{stat.etag}"'


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_server_that_fails_twice_is_asked_a_third_time(blobs: BlobStore, proxy: S3Proxy, status: int) -> None:
    proxy.fault(Fault(status=status), times=2)
    assert blobs.get("tenant/x") == DATA
    assert [seen.status for seen in proxy.asked("GET", "tenant/x")] == [status, status, 200]


def test_a_server_that_goes_on_failing_is_unavailable(blobs: BlobStore, proxy: S3Proxy, bucket: str) -> None:
    proxy.fault(Fault(status=503), times=20)
    with pytest.raises(Unavailable) as caught:
        blobs.get("tenant/x")
    assert _says_nothing_of(caught.value, bucket)


def test_a_server_that_hangs_is_unavailable(s3_server: WeedServer, proxy: S3Proxy, bucket: str) -> None:
    blobs = _opened(proxy, s3_server, bucket, read_s=0.2)
    blobs.put("tenant/x", DATA)
    with proxy.held("tenant/x"), pytest.raises(Unavailable, match="does not answer"):
        blobs.get("tenant/x")
    assert blobs.get("tenant/x") == DATA


_XML = "<Error><Code>{}</Code><Message>key AKIASECRET at 10.0.0.9</Message><Resource>/b/k</Resource></Error>"


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (403, _XML.format("AccessDenied"), StoreRefused, "AccessDenied"),
        (403, _XML.format("RequestTimeTooSkewed"), StoreRefused, "clocks"),
        (400, _XML.format("ExpiredToken"), StoreRefused, "ExpiredToken"),
        (403, "<html>no</html>", StoreRefused, "403"),
        (404, _XML.format("NoSuchKey"), FileNotFoundError, "no object"),
        (404, _XML.format("NoSuchBucket"), FileNotFoundError, "no object"),
        (404, "<html>not S3 at all</html>", Unavailable, "404"),
        (412, _XML.format("PreconditionFailed"), Changed, "replaced"),
        (507, _XML.format("XMinioStorageFull"), StoreFull, "no room"),
        (429, _XML.format("SlowDown"), Unavailable, "429"),
        (301, _XML.format("PermanentRedirect"), StoreRefused, "PermanentRedirect"),
        (400, "<not xml", Unavailable, "does not answer"),
    ],
)
def test_what_a_server_answers_is_one_of_our_errors_and_its_words_stay_with_us(
    blobs: BlobStore,
    proxy: S3Proxy,
    caplog: pytest.LogCaptureFixture,
    bucket: str,
    status: int,
    body: str,
    kind: type[Exception],
    said: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    html = "html" in body
    proxy.fault(Fault(status=status, body=body, content_type="text/html" if html else "application/xml"))
    with pytest.raises(kind, match=said) as caught:
        blobs.get("tenant/x")
    assert type(caught.value) is kind
    if isinstance(caught.value, InfiniLoraError):
        assert _says_nothing_of(caught.value, bucket)
    for record in caplog.records:
        if record.name.startswith("infinilora"):
            assert "AKIASECRET" not in str(vars(record))
            assert bucket not in str(vars(record))


def test_a_redirect_leads_nowhere(blobs: BlobStore, proxy: S3Proxy) -> None:
    proxy.fault(Fault(status=307, headers={"Location": f"{proxy.endpoint}/elsewhere"}))
    with pytest.raises(Unavailable):
        blobs.get("tenant/x")
    assert len(proxy.asked("GET")) == 1


def test_wrong_keys_are_refused_and_not_repeated(proxy: S3Proxy, s3_server: WeedServer, bucket: str) -> None:
    for access, secret in ((s3_server.access_key, "wrong" * 4), ("AKIANOBODY", s3_server.secret_key)):
        blobs = open_blobs(proxy.url(bucket), access_key=access, secret_key=secret)
        with pytest.raises(StoreRefused, match="operator") as caught:
            blobs.put("x", b"1")
        assert _says_nothing_of(caught.value, bucket, access, secret)
        with pytest.raises(StoreRefused):
            blobs.stat("x")


def test_nobody_at_the_endpoint_is_unavailable() -> None:
    blobs = open_blobs("s3://bucket?endpoint=http://127.0.0.1:9", access_key="a", secret_key="b" * 8)
    with pytest.raises(Unavailable, match="does not answer") as caught:
        blobs.get("x")
    assert _says_nothing_of(caught.value, "bucket")


# Whose keys ----------------------------------------------------------------------------------------


def test_keys_of_the_environment(proxy: S3Proxy, s3_server: WeedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    for source in ("env", "auto"):
        open_blobs(proxy.url("env-keys"), credentials=Credentials(source=source)).put("x", b"1")


def _profiles(access: str, secret: str) -> str:
    other, mine = ("[other]", "a", "b"), ("[mine]", access, secret)
    return "".join(f"{n}\naws_access_key_id = {a}\naws_secret_access_key = {s}\n" for n, a, s in (other, mine))


def test_keys_of_a_profile_in_a_file_and_their_change_under_way(
    proxy: S3Proxy, s3_server: WeedServer, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    file.write_text(_profiles(s3_server.access_key, "not yet"))
    blobs = open_blobs(proxy.url("file-keys"), credentials=Credentials(source="file", file=str(file), profile="mine"))
    with pytest.raises(StoreRefused):
        blobs.put("x", b"1")
    file.write_text(_profiles(s3_server.access_key, s3_server.secret_key))
    assert blobs.put("x", b"1")
    file.unlink()
    with pytest.raises(StoreRefused, match=r"no keys .* in the credentials file") as caught:
        blobs.put("x", b"1")
    assert str(tmp_path) not in str(caught.value)


def test_keys_of_a_containers_role(
    proxy: S3Proxy, s3_server: WeedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = f'{{"AccessKeyId": "{s3_server.access_key}", "SecretAccessKey": "{s3_server.secret_key}"'
    (tmp_path / "role").write_text(keys + ', "Token": null, "Expiration": "2999-01-01T00:00:00Z"}')

    with _served(partial(_Quiet, directory=str(tmp_path))) as port:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{port}/role")
        assert open_blobs(proxy.url("role-keys"), credentials=Credentials(source="role")).put("x", b"1")


def test_half_a_pair_of_keys_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="secret key is not"):
        Credentials(access_key="a")
    with pytest.raises(InvalidRequest, match="access key is not") as caught:
        Credentials(secret_key="hidden")
    assert "hidden" not in str(caught.value)
    assert "hidden" not in repr(Credentials(access_key="a", secret_key="hidden", session_token="hidden"))


# Where -----------------------------------------------------------------------------------------------


def test_the_bucket_is_in_the_path_unless_the_virtual_style_is_named(
    proxy: S3Proxy, s3_server: WeedServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Credentials(access_key=s3_server.access_key, secret_key=s3_server.secret_key)
    open_blobs(proxy.url(bucket), credentials=keys).stat("x")
    assert proxy.seen[-1].path == f"/{bucket}/x"
    real, wanted = socket.getaddrinfo, f"{bucket}.localhost"
    # A name server of this test: not every machine resolves names below localhost.
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a: real("127.0.0.1" if host == wanted else host, *a))
    endpoint = proxy.endpoint.replace("127.0.0.1", "localhost")
    virtual = open_blobs(f"s3://{bucket}?endpoint={endpoint}&style=virtual", credentials=keys)
    proxy.fault(Fault(method="HEAD", status=404))
    assert virtual.stat("x") is None
    assert proxy.seen[-1].path == "/x"
    assert proxy.seen[-1].headers["host"].startswith(f"{bucket}.localhost:")


def test_the_region_is_the_one_that_was_named(proxy: S3Proxy, s3_server: WeedServer, bucket: str) -> None:
    keys = Credentials(access_key=s3_server.access_key, secret_key=s3_server.secret_key)
    for query, region in (("", "us-east-1"), ("&region=eu-north-7", "eu-north-7")):
        proxy.fault(Fault(method="HEAD", status=404))
        open_blobs(f"s3://{bucket}?endpoint={proxy.endpoint}{query}", credentials=keys).stat("x")
        assert f"/{region}/s3/aws4_request" in proxy.seen[-1].headers["authorization"]


def test_a_self_signed_server_is_trusted_by_its_ca_or_by_a_switch_only() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    with _served(_Nothing, context) as port:
        url = f"s3://bucket?endpoint=https://127.0.0.1:{port}"
        assert open_blobs(f"{url}&ca={TLS / 'cert.pem'}").stat("x") is None
        with pytest.warns(InsecureRequestWarning, match="Unverified HTTPS"):
            assert open_blobs(f"{url}&insecure=true").stat("x") is None
        with pytest.raises(Unavailable):
            open_blobs(url).stat("x")


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsWeedServer]:
    server = TlsWeedServer(tmp_path_factory.mktemp("weed-tls")).start()
    yield server
    server.kill()


def _keys(server: WeedServer) -> Credentials:
    return Credentials(access_key=server.access_key, secret_key=server.secret_key)


def test_a_real_server_under_an_authority_of_its_own(tls_server: TlsWeedServer) -> None:
    blobs = open_blobs(tls_server.url("tls"), credentials=_keys(tls_server))
    assert blobs.put("x", DATA)
    assert blobs.get_range("x", 7, 100) == DATA[7:107]


def _refusal(ask: Callable[[], object]) -> StoreRefused:
    """What the server says once it is heard: one that hangs up at once may cut its own word off, and is asked again."""
    for _ in range(20):
        try:
            ask()
        except StoreRefused as refused:
            return refused
        except Unavailable:
            continue
    pytest.fail("never refused")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda url: url.replace("ca.pem", "cert.pem"), "`ca` in INFINILORA_STORE_URL"),
        (lambda url: url.partition("&ca=")[0], "`ca` in INFINILORA_STORE_URL"),
        (
            lambda url: url.partition("&ca=")[0].replace("https:", "http:"),
            "endpoint in INFINILORA_STORE_URL says http:",
        ),
    ],
    ids=["another authority", "the system's authorities", "no TLS"],
)
def test_what_keeps_tls_from_being_spoken_is_named_by_its_option(
    tls_server: TlsWeedServer, caplog: pytest.LogCaptureFixture, change: Callable[[str], str], says: str
) -> None:
    blobs = open_blobs(change(tls_server.url("tls")), credentials=_keys(tls_server))
    asks: list[Callable[[], object]] = [
        *(lambda: blobs.get("tenant/x"), lambda: blobs.stat("tenant/x"), lambda: blobs.put("tenant/x", b"x")),
        # A server that hangs up with some of a body unread resets the connection, its answer with it.
        lambda: blobs.put("tenant/x", bytes(8 << 20)),
    ]
    for ask in asks:
        refused = _refusal(ask)
        assert says in str(refused)
        assert "operator" in str(refused)
        assert _says_nothing_of(refused, "bucket", str(tls_server.port))
    assert [record for record in caplog.records if record.levelno == logging.ERROR]


def test_https_to_a_server_without_tls_is_named_by_the_endpoint(proxy: S3Proxy) -> None:
    blobs = open_blobs(f"s3://bucket?endpoint={proxy.endpoint.replace('http:', 'https:')}")
    with pytest.raises(StoreRefused, match=r"endpoint in INFINILORA_STORE_URL says https"):
        blobs.stat("x")


def test_a_certificate_of_another_host_is_told_as_that(
    tls_server: TlsWeedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo
    # A name server of this test: the certificate is of 127.0.0.1 and localhost.
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a: real("127.0.0.1" if host == "store" else host, *a))
    url = tls_server.url("tls").replace("127.0.0.1", "store", 1)
    with pytest.raises(StoreRefused, match="another host than the endpoint"):
        open_blobs(url, credentials=_keys(tls_server)).stat("x")


@pytest.mark.parametrize(("number", "says"), [(9, "not valid now"), (10, "not valid now"), (18, "`ca`"), (20, "`ca`")])
def test_a_certificate_that_expired_is_told_from_one_of_nobody(number: int, says: str) -> None:
    found = ssl.SSLCertVerificationError(1, "certificate verify failed: store-1.internal")
    found.verify_code = number
    with pytest.raises(StoreRefused, match=says) as caught, store_errors("x", is_plain=False):
        raise MaxRetryError(HTTPConnectionPool("store-1.internal"), "/x", SSLError(found))
    assert "store-1" not in str(caught.value)


def test_an_authority_that_is_no_certificate_is_refused_when_the_store_is_opened(tmp_path: Path) -> None:
    for text in (b"", b"no certificate", b"\xff\x00"):
        (tmp_path / "ca.pem").write_bytes(text)
        with pytest.raises(InvalidRequest, match=r"ca=.*wanted a PEM file"):
            open_blobs(f"s3://bucket?endpoint=https://127.0.0.1:9&ca={tmp_path / 'ca.pem'}")


class _Quiet(SimpleHTTPRequestHandler):
    @override
    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


class _Nothing(_Quiet):
    @override
    def do_HEAD(self) -> None:
        self.send_response(404)
        self.end_headers()


@contextmanager
def _served(handler: Callable[..., SimpleHTTPRequestHandler], tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """A web server's port."""
    server = HTTPServer(("127.0.0.1", 0), handler)
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
