"""The file of a saved session: a safetensors file that is written atomically and read with suspicion.

The session's description is JSON in the file's metadata; its arrays are the tensors. The last tensor is a SHA-256 of
everything before it, header included. Nothing in the file is ever executed, and no size in its header is used before
it was compared with the size of the file. The `safetensors` package takes only a path or the bytes of a whole file (no
cancellation, no checksum), and chooses the order of the tensors itself.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import attrs

from protocol.errors import SessionFileError
from protocol.reprs import shown_path
from protocol.tensor import DTYPES, Tensor
from runtime.generation.token_stream import SessionFile

VERSION = 1

CheckCancelled = Callable[[], None]

_VERSION_KEY, _CONTENT_KEY, _CHECKSUM = "outrider_session", "content", "checksum"
_DIGEST_BYTES = hashlib.sha256().digest_size
_LENGTH_BYTES = 8
# The limit of the safetensors format.
_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS, _MAX_DIMENSION = 16, 2**31 - 1
# Bytes that are read or written between two checks for a cancellation.
_CHUNK_BYTES = 1 << 22


@attrs.frozen
class Contents:
    """The contents of a session file: a JSON value, and tensors by name; the name "checksum" is reserved."""

    content: Any
    tensors: Mapping[str, Tensor]


def write(path: SessionFile, contents: Contents, check_cancelled: CheckCancelled = lambda: None) -> int:
    """Write a session file atomically; an existing file is replaced.

    It is written beside its place, flushed to the disk, and moved there in one step; a process that is killed leaves a
    hidden file `.outrider-….tmp`. A symbolic link is followed. A new file is readable by its owner alone, since it has
    the texts of the session; otherwise permissions stay. A file object is written from its position on, and keeps what
    was written before an error. What `check_cancelled` raises, every few megabytes, ends the writing.

    Returns: the size of the file, in bytes.

    Raises: SessionFileError: the system does not let the file be written; its `OSError` is the cause.
    """
    try:
        if not isinstance(path, (str, os.PathLike)):
            return _write_to(path, contents, check_cancelled)
        place = Path(os.path.realpath(path))
        mode = _mode_of(place)
        descriptor, name = tempfile.mkstemp(prefix=".outrider-", suffix=".tmp", dir=place.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                size = _write_to(file, contents, check_cancelled)
                os.fchmod(file.fileno(), mode)
                file.flush()
                os.fsync(file.fileno())
            check_cancelled()
            os.replace(name, place)
        finally:
            # It was moved to its place, unless there was an error.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        _flush_directory(place.parent)
        return size
    except (OSError, ValueError) as error:  # ValueError: a null character in a path
        raise SessionFileError(f"cannot write {named(path)}: {_reason(error)}; choose another place for it") from error


def _mode_of(place: Path) -> int:
    """The permissions of a file at a place. Raises: OSError: the place has something that must not be replaced."""
    try:
        status = place.stat()
    except FileNotFoundError:
        return 0o600
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no ordinary file")
    if not os.access(place, os.W_OK):
        # Replacing a read-only file would be possible, and against the intention of its owner.
        raise PermissionError(errno.EACCES, "it is read-only")
    return stat.S_IMODE(status.st_mode)


def _write_to(file: IO[bytes], contents: Contents, check_cancelled: CheckCancelled) -> int:
    digest = hashlib.sha256()
    header = _header(contents)
    head = memoryview(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
    size = 0
    for view in [head, *(tensor.data for tensor in contents.tensors.values())]:
        for begin in range(0, len(view), _CHUNK_BYTES):
            check_cancelled()
            chunk = view[begin : begin + _CHUNK_BYTES]
            digest.update(chunk)
            _write_all(file, chunk)
        size += len(view)
    _write_all(file, memoryview(digest.digest()))
    return size + _DIGEST_BYTES


def _write_all(file: IO[bytes], view: memoryview) -> None:
    # An unbuffered file may take less than all.
    while view:
        if not (num_written := file.write(view)):
            raise OSError(errno.EAGAIN, "it takes no more data")
        view = view[num_written:]


def _header(contents: Contents) -> bytes:
    content = json.dumps(contents.content, allow_nan=False, separators=(",", ":"))
    header: dict[str, Any] = {"__metadata__": {_VERSION_KEY: str(VERSION), _CONTENT_KEY: content}}
    begin = 0
    entries = [(name, tensor.dtype, tensor.shape, len(tensor.data)) for name, tensor in contents.tensors.items()]
    for name, dtype, shape, size in [*entries, (_CHECKSUM, "U8", (_DIGEST_BYTES,), _DIGEST_BYTES)]:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + size]}
        begin += size
    written = json.dumps(header, separators=(",", ":")).encode()
    # The format asks for tensors that begin at a multiple of eight bytes.
    return written + b" " * (-len(written) % 8)


def _flush_directory(directory: Path) -> None:
    """Flush a directory's entries to the disk, where the file system supports that."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def read(path: SessionFile, check_cancelled: CheckCancelled = lambda: None) -> Contents:
    """Read a session file and check that it is unchanged.

    The whole file is read twice: first for its checksum, then to keep the data in memory, which must match the checksum
    again. A file that another one replaces meanwhile is read to its end, and so is a file object, which must be
    seekable. What `check_cancelled` raises, every few megabytes, ends the reading.

    Raises: SessionFileError: the system does not let the file be read (its `OSError` is the cause); it is no saved
        session; a newer version wrote it; it is damaged or cut short.
    """
    try:
        if not isinstance(path, (str, os.PathLike)):
            begin = path.tell()
            size = path.seek(0, os.SEEK_END) - begin
            path.seek(begin)
            return _Reader(path, path, begin, size, check_cancelled).read()
        with open(path, "rb", opener=_open_ordinary) as file:
            size = os.fstat(file.fileno()).st_size
            return _Reader(path, file, 0, size, check_cancelled).read()
    except (OSError, ValueError) as error:
        raise SessionFileError(
            f"cannot read {named(path)}: {_reason(error)}; give a file that a conversation was saved to"
        ) from error


def _open_ordinary(path: str, flags: int) -> int:
    # Non-blocking: opening a pipe would wait for its writer.
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no ordinary file")
    return descriptor


class _Entry(NamedTuple):
    """The place of a tensor: bytes `begin` to `end` of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@attrs.define
class _Reader:
    """Reads one file, or `size` bytes of it from `begin` on."""

    path: SessionFile
    file: IO[bytes]
    begin: int
    size: int
    check_cancelled: CheckCancelled

    def read(self) -> Contents:
        header_bytes = self._header_bytes()
        header = self._parsed(header_bytes, "its header")
        if not isinstance(header, dict):
            self._foreign("its header is not a table")
        content = self._content(header.pop("__metadata__", None))
        head = len(header_bytes).to_bytes(_LENGTH_BYTES, "little") + header_bytes
        entries = self._entries(header, self.size - len(head))
        # The checksum first, without keeping the data: a file that is mostly a hole takes no memory.
        digest = hashlib.sha256(head)
        for chunk in self._chunks(self.size - _DIGEST_BYTES - len(head)):
            digest.update(chunk)
        checksum = digest.digest()
        if self._take(_DIGEST_BYTES) != checksum:
            self._damaged("its checksum does not match: something in it was altered")
        self.file.seek(self.begin + len(head))
        digest, tensors = hashlib.sha256(head), {}
        for entry in entries:
            data = bytearray()
            for chunk in self._chunks(entry.end - entry.begin):
                digest.update(chunk)
                data += chunk
            tensors[entry.name] = Tensor(entry.dtype, entry.shape, memoryview(data))
        if digest.digest() != checksum:
            self._damaged("it was altered while it was read")
        return Contents(self._parsed(content, "what it says of itself"), tensors)

    def _header_bytes(self) -> bytearray:
        max_bytes = self.size - _LENGTH_BYTES - _DIGEST_BYTES
        if max_bytes < 2:
            self._foreign(f"it has {self.size} bytes")
        length = int.from_bytes(self._take(_LENGTH_BYTES), "little")
        if not 2 <= length <= _MAX_HEADER_BYTES:
            self._foreign("it does not begin like one")
        first = self._take(1)
        if first != b"{":
            self._foreign("it does not begin like one")
        if length > max_bytes:
            self._damaged(f"its header should have {length} bytes, and after it {_DIGEST_BYTES}; it has {self.size}")
        return first + self._take(length - 1)

    def _content(self, metadata: Any) -> str:
        if not isinstance(metadata, dict) or not isinstance(version := metadata.get(_VERSION_KEY), str):
            self._foreign("it is a safetensors file of something else")
        # Checked before anything else, which a newer version may write differently.
        if not version.isascii() or not version.isdecimal() or len(version) > 9 or int(version) < 1:
            self._damaged(f"its version is {version[:20]!r}")
        if int(version) > VERSION:
            raise SessionFileError(
                f"{named(self.path)} is of version {version}, and this Outrider reads up to {VERSION}; "
                "update Outrider, or save the session again with this one"
            )
        if not isinstance(content := metadata.get(_CONTENT_KEY), str):
            self._damaged("it says nothing of itself")
        return content

    def _entries(self, header: dict[str, Any], num_bytes: int) -> list[_Entry]:
        """The places of the tensors, which must fill the file without gaps; the checksum is the last."""
        entries, end = [self._entry(name, described) for name, described in header.items()], 0
        for entry in entries:
            if entry.begin != end:
                self._damaged(f"tensor {entry.name[:40]!r} does not begin where the one before it ends")
            end = entry.end
        if [each[:3] for each in entries[-1:]] != [(_CHECKSUM, "U8", (_DIGEST_BYTES,))]:
            self._damaged("it has no checksum at its end")
        if end != num_bytes:
            self._damaged(f"its tensors should have {end} bytes, and it has {num_bytes} for them")
        return entries[:-1]

    def _entry(self, name: str, described: Any) -> _Entry:
        match described:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
                fits = dtype in DTYPES and len(shape) <= _MAX_DIMENSIONS
                fits = fits and all(type(n) is int and 0 <= n <= _MAX_DIMENSION for n in shape)
                if fits and 0 <= begin <= end and end - begin == math.prod(shape) * DTYPES[dtype]:
                    return _Entry(name, dtype, tuple(shape), begin, end)
        self._damaged(f"tensor {name[:40]!r} is not described as it should be")

    def _take(self, num_bytes: int) -> bytearray:
        """The next `num_bytes` bytes, which the file is known to have."""
        return bytearray().join(self._chunks(num_bytes))

    def _chunks(self, num_bytes: int) -> Iterator[bytes]:
        """The next `num_bytes` bytes, in pieces."""
        while num_bytes > 0:
            self.check_cancelled()
            if not (chunk := self.file.read(min(num_bytes, _CHUNK_BYTES))):
                self._damaged("it was cut short while it was read")
            num_bytes -= len(chunk)
            yield chunk

    def _parsed(self, written: bytes | bytearray | str, what: str) -> Any:
        def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            if len(table := dict(pairs)) != len(pairs):
                raise ValueError("a name occurs twice")
            return table

        try:
            return json.loads(written, object_pairs_hook=without_repetition, parse_constant=_no_constant)
        except (ValueError, RecursionError):  # UnicodeDecodeError among them
            self._damaged(f"{what} cannot be read as JSON")

    def _foreign(self, why: str) -> NoReturn:
        raise SessionFileError(
            f"{named(self.path)} is no saved session: {why}; give a file that a conversation was saved to"
        )

    def _damaged(self, why: str) -> NoReturn:
        raise SessionFileError(f"{named(self.path)} is damaged: {why}; use another copy of it, or save again")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def shown(path: SessionFile) -> str:
    """A file in messages: its path, or its class."""
    return shown_path(os.fsdecode(path)) if isinstance(path, (str, os.PathLike)) else f"<{type(path).__name__}>"


def named(path: SessionFile) -> str:
    """A file at the beginning of a message."""
    return f"session file {shown(path)}"


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
