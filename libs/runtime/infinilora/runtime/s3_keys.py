"""Finds the keys that requests to S3 are signed with, by the S3 client's own providers."""

import configparser
import logging

import urllib3
from minio.credentials import AWSConfigProvider, EnvAWSProvider, EnvMinioProvider, IamAwsProvider, Provider
from minio.credentials import Credentials as Keys
from minio.credentials.providers import StaticProvider
from typing_extensions import override

from infinilora.protocol.errors import StoreRefused
from infinilora.runtime.credentials import Credentials

logger = logging.getLogger(__name__)

_ROLE_TIMEOUT = urllib3.Timeout(connect=1.0, read=5.0)


def keys_of(credentials: Credentials) -> Provider | None:
    """The provider that `credentials` means; None for requests without a signature."""
    match credentials.source:
        case "none":
            return None
        case "keys":
            return _given(credentials)
        case "env":
            return _Named("the environment", [EnvAWSProvider(), EnvMinioProvider()])
        case "file":
            return _file(credentials)
        case "role":
            asked = urllib3.PoolManager(timeout=_ROLE_TIMEOUT, retries=urllib3.Retry(total=2, redirect=False))
            return _Named("the machine's role", [IamAwsProvider(http_client=asked)])
        case "auto":
            return _found(credentials)


def _given(credentials: Credentials) -> Provider:
    return StaticProvider(credentials.access_key, credentials.secret_key, credentials.session_token or None)


def _file(credentials: Credentials) -> Provider:
    return _Named("the credentials file", [AWSConfigProvider(credentials.file or None, credentials.profile or None)])


def _found(credentials: Credentials) -> Provider | None:
    if credentials.access_key:
        return _given(credentials)
    if credentials.file or credentials.profile:
        return _file(credentials)
    environment = _Named("the environment", [EnvAWSProvider(), EnvMinioProvider()])
    if environment.has_keys():
        return environment
    logger.info("no keys for the object store are set; it is asked without")
    return None


class _Named(Provider):  # type: ignore[misc]  # the client has no types
    """The first provider that has keys. Without any: StoreRefused, which says where they were looked for."""

    def __init__(self, place: str, providers: list[Provider]) -> None:
        self._place = place
        self._providers = providers

    def has_keys(self) -> bool:
        try:
            self.retrieve()
        except StoreRefused:
            return False
        return True

    @override
    def retrieve(self) -> Keys:
        for provider in self._providers:
            try:
                return provider.retrieve()
            except (ValueError, configparser.Error):  # its words may hold parts of what it read
                continue
        raise StoreRefused(f"no keys for the object store were found in {self._place}", retry_after_s=1.0)
