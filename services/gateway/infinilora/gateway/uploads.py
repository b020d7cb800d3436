"""The files of an upload, written once, as they come in, to where the worker reads them.

A multipart body with an adapter's files or one archive of them, or an archive as the body itself. Archives are not
opened here; of other files only those that an adapter has are written, and the rest passes by.
"""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, NamedTuple

from fastapi import Request
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from infinilora.gateway.scratch import disk_errors
from infinilora.protocol.errors import InvalidRequest
from infinilora.weights.unpack import FileLimits, Picker

ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".tbz2", ".tar.bz2", ".txz", ".tar.xz")
RAW_TYPES = frozenset(
    f"application/{kind}"
    for kind in ("octet-stream", "zip", "gzip", "x-gzip", "tar", "x-tar", "x-gtar", "x-bzip2", "x-xz")
)
MULTIPART = "multipart/form-data"
MAX_FIELDS = 16
MAX_FIELD_BYTES = 8 << 10
"""Of a form field's value."""


class UploadLimits(NamedTuple):
    """Of one adapter's files, unpacked."""

    max_bytes: int = 16 << 30
    max_files: int = 256


class Received(NamedTuple):
    """What an upload has brought: its fields, and the directory or the archive with its files."""

    fields: Mapping[str, str]
    source: Path


def is_upload(request: Request) -> bool:
    """Whether the body of a request is files, by its content type."""
    kind = _content_type(request)[0]
    return kind == MULTIPART or kind in RAW_TYPES


@asynccontextmanager
async def received(request: Request, limits: UploadLimits) -> AsyncIterator[Received]:
    """Take the files in; they are gone afterwards.

    Raises InvalidRequest or TooLarge for what they are, SourceNotFound if no adapter is among them.
    """
    with disk_errors():
        scratch = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="upload-"))
    try:
        yield await _receive(request, scratch, limits)
    finally:
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)


async def _receive(request: Request, scratch: Path, limits: UploadLimits) -> Received:
    kind, options = _content_type(request)
    files = _Files(scratch, limits)
    try:
        if kind != MULTIPART:
            await asyncio.to_thread(files.begin, "body.tar")
            async for chunk in request.stream():
                await asyncio.to_thread(files.write, chunk)
            fields = _once(request.query_params.multi_items())
            return Received(fields, await asyncio.to_thread(files.end))
        form = _Form(options.get(b"boundary", b""))
        async for chunk in request.stream():
            # One thread for a whole chunk: a form of many small parts is not many trips.
            await asyncio.to_thread(files.take, form.feed(chunk))
        form.finish()
        return Received(_once(form.fields), await asyncio.to_thread(files.end))
    finally:
        files.close()


def _once(fields: Sequence[tuple[str, str]]) -> dict[str, str]:
    """By name. Raises InvalidRequest for one that is there twice: nobody can tell which was meant."""
    named = dict(fields)
    if len(named) < len(fields):
        twice = next(name for number, (name, _) in enumerate(fields) if name in dict(fields[:number]))
        raise InvalidRequest(f"field {twice[:40]!r} is there twice; wanted it once", param=twice[:40])
    return named


def _content_type(request: Request) -> tuple[str, dict[bytes, bytes]]:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    return kind.decode("latin-1"), options


class _Begin(NamedTuple):
    """A file begins. Until the next one begins, bytes are its content."""

    name: str


_Event = _Begin | bytes


class _Form:
    """Tells files from fields in a multipart body. Fields are kept, files go by as events."""

    def __init__(self, boundary: bytes) -> None:
        self.fields: list[tuple[str, str]] = []
        self._events: list[_Event] = []
        self._header = self._value = b""
        self._disposition = b""
        self._field: str | None = None
        self._data = bytearray()
        self._is_over = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise InvalidRequest(f"the multipart body cannot be read: {error}") from None

    def feed(self, chunk: bytes) -> list[_Event]:
        """What the next bytes of the body hold of files."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise InvalidRequest(f"the multipart body cannot be read: {error}") from None
        events, self._events = self._events, []
        return events

    def finish(self) -> None:
        if not self._is_over:
            raise InvalidRequest("the multipart body ends before its last boundary")

    def _on_part_begin(self) -> None:
        self._disposition = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise InvalidRequest("a part of the multipart body has no name")
        self._field, self._data = None, bytearray()
        if b"filename" in options:
            self._events.append(_Begin(options[b"filename"].decode("utf-8", "replace")))
        elif len(self.fields) >= MAX_FIELDS:
            raise InvalidRequest(f"the form holds more than {MAX_FIELDS} fields")
        else:
            self._field = options[b"name"].decode("utf-8", "replace")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._events.append(data[start:end])
        else:
            self._data += data[start:end]
            if len(self._data) > MAX_FIELD_BYTES:
                raise InvalidRequest(f"form field {self._field[:40]!r} holds more than {MAX_FIELD_BYTES} bytes")

    def _on_part_end(self) -> None:
        if self._field is not None:
            self.fields.append((self._field, self._data.decode("utf-8", "replace")))

    def _on_end(self) -> None:
        self._is_over = True


class _Files:
    """The files of one upload on disk. Blocking: its methods run in threads, one after the other."""

    def __init__(self, scratch: Path, limits: UploadLimits) -> None:
        self._archive = scratch / "archive"
        self._picker = Picker(scratch, FileLimits(limits.max_bytes, limits.max_files))
        self._num_files = 0
        self._out: IO[bytes] | None = None

    def take(self, events: list[_Event]) -> None:
        for event in events:
            if isinstance(event, _Begin):
                self.begin(event.name)
            else:
                self.write(event)

    def begin(self, name: str) -> None:
        """The next file; one without a name is an empty field of a browser's form."""
        self.close()
        if not name:
            return
        self._num_files += 1
        is_archive = name.lower().endswith(ARCHIVES)
        if self._num_files > 1 and (is_archive or self._archive.exists()):
            raise InvalidRequest("the upload holds an archive and more; wanted it alone", param="files")
        path = self._archive if is_archive else self._picker.place(name)
        if path is not None:
            with disk_errors():
                self._out = path.open("xb")

    def write(self, data: bytes) -> None:
        self._picker.spend(len(data))
        if self._out is not None:
            with disk_errors():
                self._out.write(data)

    def end(self) -> Path:
        """Where the adapter is: the archive, or the directory of its files."""
        self.close()
        if not self._num_files:
            raise InvalidRequest("the upload holds no file", param="files")
        return self._archive if self._archive.exists() else self._picker.chosen()

    def close(self) -> None:
        """Harmless when nothing is open."""
        if self._out is not None:
            with disk_errors():
                self._out.close()
            self._out = None
