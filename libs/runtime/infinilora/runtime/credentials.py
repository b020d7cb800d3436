"""With which keys the object store is asked, and where they are found. A value: it finds nothing itself."""

from dataclasses import dataclass, field
from typing import Literal

from infinilora.protocol.errors import InvalidRequest

From = Literal["auto", "keys", "env", "file", "role", "none"]


@dataclass(frozen=True, slots=True)
class Credentials:
    """Keys, or the one place where they are looked for.

    | `source` | keys come from |
    |---|---|
    | `keys` | `access_key`, `secret_key`, `session_token` |
    | `env` | AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, or MINIO_ACCESS_KEY, MINIO_SECRET_KEY |
    | `file` | `profile` of an AWS credentials file, read again for each request: keys may be changed under way |
    | `role` | the machine's, container's or pod's role; the only source that asks another server than the store |
    | `none` | nowhere: requests are not signed |
    | `auto` | `keys` if there are any, else the file if one is named, else `env` if it has any, else `none` |
    """

    access_key: str = ""
    secret_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    source: From = "auto"
    file: str = ""
    """Empty: the usual place, ~/.aws/credentials."""
    profile: str = ""
    """Empty: AWS_PROFILE, or `default`."""

    def __post_init__(self) -> None:
        if bool(self.access_key) != bool(self.secret_key):
            found, missing = ("access", "secret") if self.access_key else ("secret", "access")
            raise InvalidRequest(f"the object store's {found} key is given and its {missing} key is not; wanted both")
        if self.source == "keys" and not self.access_key:
            raise InvalidRequest("the object store's keys are to be given, and are not")
