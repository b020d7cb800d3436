"""What an S3 server's errors are to us: each becomes one of the blob store's.

What a server answers is not repeated: its words may hold hosts and keys. Its code is logged. Knows no requests.
"""

import logging
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from xml.etree.ElementTree import ParseError

import urllib3
from minio.error import InvalidResponseError, S3Error, ServerError

from infinilora.protocol.errors import InfiniLoraError, StoreFull, StoreRefused, Unavailable
from infinilora.runtime.blob_store import Changed

logger = logging.getLogger(__name__)

_ABSENT = frozenset({"NoSuchKey", "NoSuchBucket", "NoSuchObject", "NoSuchVersion", "ResourceNotFound"})
_FULL = frozenset({"XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage", "QuotaExceeded"})
# What the client makes of a HEAD answered by 400 and no body: a bad token, another region, plain HTTP to a TLS port.
_BARE_400 = "BadRequest"
_REFUSED = frozenset({
    "AccessDenied", "AccountProblem", "AllAccessDisabled", "AuthorizationHeaderMalformed", _BARE_400,
    "ExpiredToken", "InvalidAccessKeyId", "InvalidSecurity", "InvalidToken", "NotSignedUp", "PermanentRedirect",
    "RequestExpired", "RequestTimeTooSkewed", "SignatureDoesNotMatch", "TokenRefreshRequired",
})  # fmt: skip
_STATUS = re.compile(r"Response code: (\d+)")
_EXPIRED, _OF_ANOTHER_HOST = {9, 10}, {62, 64}
"""OpenSSL's numbers of what is wrong with a certificate."""
_AT = "INFINILORA_STORE_URL"
_TO_PLAIN = f"its endpoint in {_AT} says http: does the server want https?"


class PastTheEnd(Exception):
    """A range that begins after the object's last byte."""


@contextmanager
def store_errors(name: str, *, is_plain: bool) -> Iterator[None]:
    """Translate what the client raises over the object `name`. `is_plain`: it is asked without TLS."""
    try:
        yield
    except S3Error as error:
        raise _translated(name, error.code or "", error.response.status, is_plain=is_plain) from error
    except ServerError as error:
        raise _by_status(error.status_code) from error
    except InvalidResponseError as error:
        found = _STATUS.search(str(error))
        status = int(found[1]) if found else 0
        if status == 400 and is_plain:
            raise _refused("", status, _TO_PLAIN) from error
        raise _by_status(status) from error
    except (urllib3.exceptions.HTTPError, OSError, ParseError, UnicodeDecodeError) as error:
        if why := _why_no_tls(error):
            raise _distrusted(why) from error
        logger.info("object store does not answer", extra={"reason": type(error).__name__})
        raise Unavailable("the object store does not answer, or not as one", retry_after_s=1.0) from error


def _translated(name: str, code: str, status: int, *, is_plain: bool) -> Exception:
    if code in _ABSENT:
        return FileNotFoundError(f"no object {name!r}")
    if code == "InvalidRange":
        return PastTheEnd()
    if code == "PreconditionFailed":
        return Changed("the object was replaced while it was read")
    if code in _FULL:
        return StoreFull("the object store has no room", retry_after_s=10.0)
    if code in _REFUSED:
        return _refused(code, status, _TO_PLAIN if is_plain and code == _BARE_400 else "")
    logger.info("object store answers an error", extra={"s3_code": code, "http_status": status})
    return _by_status(status)


def _by_status(status: int) -> InfiniLoraError:
    match status:
        case 401 | 403:
            return _refused("", status)
        case 412:
            return Changed("the object was replaced while it was read")
        case 507:
            return StoreFull("the object store has no room", retry_after_s=10.0)
        case _:
            return Unavailable(f"the object store answers with HTTP status {status}", retry_after_s=1.0)


def _refused(code: str, status: int, more: str = "") -> StoreRefused:
    logger.error("object store refuses us", extra={"s3_code": code, "http_status": status})
    return StoreRefused(
        f"the object store does not let this service in ({code or f'HTTP status {status}'}): "
        f"an operator must see to its keys, their rights and the clocks{'; ' * bool(more)}{more}",
        retry_after_s=5.0,
    )


def _distrusted(why: str) -> StoreRefused:
    logger.error("object store is not trusted", extra={"reason": why})
    return StoreRefused(f"the object store is not trusted: {why}; an operator must see to it", retry_after_s=5.0)


def _why_no_tls(error: BaseException) -> str:
    """What keeps TLS from being spoken, and the option that may be wrong; empty if it is not that."""
    match _tls_error(error):
        case ssl.SSLCertVerificationError(verify_code=code) if code in _OF_ANOTHER_HOST:
            return f"its certificate is for another host than the endpoint in {_AT}"
        case ssl.SSLCertVerificationError(verify_code=code) if code in _EXPIRED:
            return "its certificate is not valid now"
        case ssl.SSLCertVerificationError():
            return f"no authority that is known has signed its certificate (`ca` in {_AT} names one)"
        case ssl.SSLError(reason="WRONG_VERSION_NUMBER"):
            return f"it does not speak TLS (its endpoint in {_AT} says https)"
        case _:
            return ""


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    """The error of the TLS library that is wrapped in one of the client's."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, ssl.SSLError):
        inner = getattr(seen, "reason", None) or (seen.args[0] if seen.args else None)
        seen = inner if isinstance(inner, BaseException) else seen.__cause__
    return seen
