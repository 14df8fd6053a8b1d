"""The files of a prefix cache on disk: two for each cached sequence, in the container of saved sessions.

The larger file has the sequence, and the smaller one what a search needs: its tokens. Each is written atomically and
has a checksum of its own. The smaller one is written last and deleted first, so that a sequence is found only while it
is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from actors.mlx.sequence_state import SequenceRecord
from actors.persistence.fingerprint import Fingerprint
from actors.prefix_cache import pack
from protocol.errors import SessionFileError, SettingsError
from protocol.reprs import shown_path
from protocol.tensor import Tensor
from protocol.validation import must_be
from protocol.wording import Message
from runtime.persistence import session_file
from runtime.persistence.session_file import Contents

logger = logging.getLogger("outrider")

_SEQUENCE, _INDEX = ".outrider-prefix", ".outrider-prefix-index"

# A file of a writer that was killed, after this many seconds: another process may be writing the younger ones.
_ABANDONED_S = 3600


@attrs.frozen(eq=False)
class StoredPrefix:
    """What a search needs of a stored sequence.

    Attributes:
        tokens: its cached tokens.
        num_prompt: how many of them were the prompt of their text.
        lengths: the lengths at which another text can continue.
        can_be_cut: whether another text can continue anywhere.
        packed: the tokens, as `pack` gives them.
    """

    tokens: tuple[int, ...]
    num_prompt: int
    lengths: tuple[int, ...]
    can_be_cut: bool
    packed: bytes

    @property
    def key(self) -> str:
        """Names the sequence among those of its model."""
        return hashlib.sha256(self.packed).hexdigest()[:32]

    def num_reusable(self, num_common: int) -> int:
        """How many tokens a text can reuse that has the first `num_common` in common."""
        if self.can_be_cut:
            return num_common
        return max((length for length in self.lengths if length <= num_common), default=0)


def check_folder(folder: Any) -> Path:
    """The folder of a prefix cache, made if it is missing; readable by its owner alone, since it has texts.

    Raises: SettingsError: it is no path, or cannot be made.
    """
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise must_be("prefix_cache_dir", Message("the path of a directory or {none}"), folder)
    path = Path(folder).expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError.of(
            "{prefix_cache_dir} {path} cannot be made: {why}; give another directory",
            path=shown_path(str(folder)),
            why=error.strerror,
        ) from error
    return path


class PrefixFiles:
    """The files of one model in a folder that several models and processes may share. May be used in any thread."""

    def __init__(
        self, folder: Path, max_bytes: int, fingerprint: Fingerprint, cache_options: Mapping[str, Any]
    ) -> None:
        """Of one model.

        Args:
            folder: exists.
            max_bytes: bound of all files in the folder; the least recently used ones are deleted.
            fingerprint, cache_options: of the model. Files of others are left alone.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        self._model = {"fingerprint": attrs.asdict(fingerprint), "cache_options": dict(cache_options)}
        self._prefix = hashlib.sha256(json.dumps(self._model, sort_keys=True).encode()).hexdigest()[:16]

    def scan(self) -> list[StoredPrefix]:
        """The model's sequences in the folder. Deletes what is damaged, and what writers that were killed have left."""
        found = []
        for path in self._folder.glob(f"{self._prefix}-*{_INDEX}"):
            try:
                found.append(self._stored(session_file.read(path)))
            except SessionFileError as error:
                logger.warning("a stored prefix is left out: %s", error)
                self._delete(path.with_suffix(_SEQUENCE))
        self._delete_abandoned()
        return found

    def write(self, stored: StoredPrefix, recorded: SequenceRecord) -> None:
        """Write a sequence, and delete others beyond the bound.

        Raises: SessionFileError: as `session_file.write`.
        """
        if sum(len(tensor.data) for tensor in recorded.tensors.values()) > self._max_bytes:
            return
        path = self._path(stored.key)
        session_file.write(path, Contents({**self._model, "sequence": recorded.description}, recorded.tensors))
        tokens = Tensor("U32", (len(stored.tokens),), memoryview(array("I", stored.tokens)).cast("B"))
        content = {"num_prompt": stored.num_prompt, "lengths": stored.lengths, "can_be_cut": stored.can_be_cut}
        session_file.write(path.with_suffix(_INDEX), Contents({**self._model, **content}, {"tokens": tokens}))
        self._trim()

    def read(self, stored: StoredPrefix) -> SequenceRecord:
        """Read a sequence, and count that as a use of it.

        Raises: SessionFileError: it is gone, damaged, or of another model.
        """
        path = self._path(stored.key)
        contents = session_file.read(path)
        self._check_model(contents, path)
        self.touch(stored)
        return SequenceRecord(contents.content.get("sequence"), contents.tensors)

    def touch(self, stored: StoredPrefix) -> None:
        """Count a use of a sequence; nothing happens if it is gone."""
        with contextlib.suppress(OSError):
            os.utime(self._path(stored.key))

    def delete(self, stored: StoredPrefix) -> None:
        """Delete a sequence; nothing happens if it is gone."""
        self._delete(self._path(stored.key))

    def _path(self, key: str) -> Path:
        return self._folder / f"{self._prefix}-{key}{_SEQUENCE}"

    def _check_model(self, contents: Contents, path: Path) -> None:
        content = contents.content
        if not isinstance(content, dict) or any(content.get(name) != value for name, value in self._model.items()):
            raise SessionFileError(f"{session_file.named(path)} is of another model; it is left out")

    def _stored(self, contents: Contents) -> StoredPrefix:
        path = self._folder
        self._check_model(contents, path)
        tensor = contents.tensors.get("tokens")
        match contents.content:
            case {"num_prompt": int(num_prompt), "lengths": list(lengths), "can_be_cut": bool(can_be_cut)}:
                if tensor is not None and tensor.dtype == "U32" and all(type(length) is int for length in lengths):
                    tokens = tuple(tensor.data.cast("I").tolist())
                    return StoredPrefix(tokens, num_prompt, tuple(lengths), can_be_cut, pack(tokens))
        raise SessionFileError(f"an index in {session_file.named(path)} is not as it should be")

    def _trim(self) -> None:
        """Delete the least recently used sequences, of all models, until the folder is within its bound."""
        files = sorted(self._stats(f"*{_SEQUENCE}"), key=lambda pair: pair[1].st_mtime_ns)
        num_bytes = sum(stat.st_size for _, stat in files)
        for path, stat in files:
            if num_bytes <= self._max_bytes:
                return
            self._delete(path)
            num_bytes -= stat.st_size

    def _delete_abandoned(self) -> None:
        before = time.time() - _ABANDONED_S
        for path, stat in self._stats(".outrider-*.tmp"):
            if stat.st_mtime < before:
                path.unlink(missing_ok=True)
        for path, stat in self._stats(f"{self._prefix}-*{_SEQUENCE}"):
            if stat.st_mtime < before and not path.with_suffix(_INDEX).exists():
                path.unlink(missing_ok=True)

    def _stats(self, pattern: str) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._folder.glob(pattern):
            with contextlib.suppress(FileNotFoundError):  # another process has deleted it
                yield path, path.stat()

    def _delete(self, path: Path) -> None:
        for each in (path.with_suffix(_INDEX), path):
            with contextlib.suppress(OSError):
                each.unlink(missing_ok=True)
