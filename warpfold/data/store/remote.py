"""Read stores at an address through fsspec, in blocks that are cached on this machine.

Credentials are those of each service's own tools (docs/howto/import.md).
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from warpfold.data.store.local import Folder, Storage, local_copy
from warpfold.errors import StorageError, UserError
from warpfold.files import is_address

# Bytes of an object that are read and cached together: two to ten blobs of a store.
BLOCK = 1 << 18
# Bytes per request. Several requests are made concurrently.
MAX_REQUEST = 1 << 23
# Blocks that a process also caches in memory.
MEMORY_BLOCKS = 64
# Default of WARPFOLD_CACHE_GB.
CACHE_GB = 20.0
# A process checks the size of the cache whenever it has added this fraction of the limit.
CHECK_FRACTION = 1 / 256
# Seconds before the second and third attempt.
PAUSES = (1.0, 5.0)
# Seconds without a connection, and without a byte.
CONNECT_TIMEOUT, READ_TIMEOUT = 30.0, 60.0
INSTALL = "pip install '.[remote]'"
# Package of each scheme, and how to install it.
SCHEMES = {
    "s3": ("s3fs", INSTALL),
    "gs": ("gcsfs", "pip install gcsfs"),
    "https": ("aiohttp", INSTALL),
    "http": ("aiohttp", INSTALL),
}
R = TypeVar("R")
log = logging.getLogger(__name__)


class Address(PurePosixPath):
    """The address of an object, or the common prefix of many objects: s3://bucket/stores/pdb."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __repr__(self) -> str:
        return f"Address({str(self)!r})"

    @property
    def scheme(self) -> str:
        return self.parts[0].rstrip(":").lower()

    def resolve(self) -> "Address":
        """Return the address itself, because addresses are never links."""
        return self


Place = Path | Address


def parse_place(path: "str | os.PathLike[str]") -> Place:
    """Parse the path of a folder or the address of a store.

    Raises UserError for an unknown scheme, and for an address without a name after its bucket or host.
    """
    if not is_address(path):
        return Path(path)
    address = Address(path)
    if address.scheme not in SCHEMES:
        raise UserError(f"{address}: unknown scheme. Pass a folder, or an address at s3://, gs:// or https://.")
    if len(address.parts) < 3:
        raise UserError(f"{address}: no name after the bucket. Pass {address}/NAME.")
    return address


def open_storage(place: Place) -> Storage:
    """Open the objects of a store. Raises UserError if a package is missing."""
    return Remote(place) if isinstance(place, Address) else Folder(place)


class Remote:
    """The objects below an address. Safe to share between threads, forks and spawned processes.

    Raises UserError if a package is missing. All methods raise FileNotFoundError, and StorageError with the name of the
    object if the service or the network fails.
    """

    def __init__(self, address: Address) -> None:
        self.path = address
        self._cache = BlockCache.from_environment()
        # Size and version of each object.
        self._versions: dict[str, tuple[int, str]] = {}
        self._has_ranges = False
        self._process: int | None = None
        self._start_process()

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read ranges of an object. All missing blocks are fetched together."""
        self._start_process()
        size, version = self._size_and_version(name)
        ranges = [(min(begin, size), min(end, size)) for begin, end in ranges]
        numbers = sorted({i for begin, end in ranges if begin < end for i in range(begin // BLOCK, -(-end // BLOCK))})
        keys = {number: self._key(name, version, number) for number in numbers}
        blocks: dict[int, bytes] = {}
        for number, key in keys.items():
            with self._lock:
                block = self._memory.get(key)
            if block is None and self._cache is not None:
                block = self._cache.get(key)
            if block is not None and len(block) == min(BLOCK, size - number * BLOCK):
                blocks[number] = block
        fetched = self._fetch_blocks(name, size, [number for number in numbers if number not in blocks])
        if self._cache is not None:
            for number, block in fetched.items():
                self._cache.put(keys[number], block)
        blocks |= fetched
        with self._lock:
            for number, key in keys.items():
                self._memory[key] = blocks[number]
                self._memory.move_to_end(key)
            while len(self._memory) > MEMORY_BLOCKS:
                self._memory.popitem(last=False)
        contents = []
        for begin, end in ranges:
            first = begin // BLOCK
            joined = b"".join(blocks[i] for i in range(first, -(-end // BLOCK))) if begin < end else b""
            contents.append(joined[begin - first * BLOCK : end - first * BLOCK])
        return contents

    def whole(self, name: str) -> bytes:
        return self._request(name, lambda files: bytes(files.cat_file(str(self.path / name))))

    def size(self, name: str) -> int:
        return self._size_and_version(name)[0]

    def forget(self, name: str, begin: int, end: int) -> bool:
        version = self._size_and_version(name)[1]
        keys = [self._key(name, version, number) for number in range(begin // BLOCK, -(-end // BLOCK))]
        with self._lock:
            was_cached = [self._memory.pop(key, None) is not None for key in keys]
        return any([*was_cached, *(self._cache is not None and self._cache.drop(key) for key in keys)])

    def view(self, name: str, size: int, digest: str, checked: bool) -> memoryview:
        return local_copy(self, name, size, digest, checked)

    def cool(self) -> None:
        """Drop the blocks in memory, and stop using the cache on disk."""
        self.close()
        self._cache = None

    def close(self) -> None:
        with self._lock:
            self._memory.clear()

    def _start_process(self) -> None:
        """Create the connections and the lock, which a process must not share with its parent."""
        if self._process == os.getpid():
            return
        scheme = self.path.scheme
        package, install = SCHEMES[scheme]
        options: dict[str, Any] = {}
        try:
            import aiohttp
            import fsspec

            self._failures: tuple[type[Exception], ...] = (OSError, ValueError, aiohttp.ClientError)
            if scheme == "s3":
                from botocore.exceptions import BotoCoreError, ClientError

                self._failures += (BotoCoreError, ClientError)
                # `_request` retries. Without this limit, the retries of three libraries would multiply.
                timeouts = {"connect_timeout": CONNECT_TIMEOUT, "read_timeout": READ_TIMEOUT}
                options["config_kwargs"] = timeouts | {"retries": {"total_max_attempts": 1}}
            elif scheme in ("http", "https"):
                timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=READ_TIMEOUT)
                options["client_kwargs"] = {"timeout": timeout, "trust_env": True}  # trust_env: proxies
            self._files: Any = fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False, **options)
        except ImportError:
            raise UserError(f"{self.path}: the package {package} is missing. Install it: {install}.") from None
        # This disables the retries of s3fs.
        self._files.retries = 1
        self._lock = threading.Lock()
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._process = os.getpid()

    def _size_and_version(self, name: str) -> tuple[int, str]:
        """Return the size of an object and a text that identifies its version."""
        if name not in self._versions:
            info = self._request(name, lambda files: files.info(str(self.path / name)))
            if info.get("size") is None:
                raise StorageError(f"{self.path / name}: the server does not state its size. Use another server.")
            marks = (info.get(key) for key in ("ETag", "etag", "LastModified", "Last-Modified", "updated"))
            self._versions[name] = int(info["size"]), str(next(filter(None, marks), ""))
        return self._versions[name]

    def _key(self, name: str, version: str, number: int) -> str:
        """Return the cache key of a block."""
        return blake2b(json.dumps([str(self.path / name), version, number]).encode(), digest_size=16).hexdigest()

    def _fetch_blocks(self, name: str, size: int, numbers: Sequence[int]) -> dict[int, bytes]:
        """Fetch blocks of an object. Neighbours share a request, and all requests run concurrently."""
        if not numbers:
            return {}
        path = str(self.path / name)
        if self.path.scheme in ("http", "https") and not self._has_ranges:
            # A server that ignores ranges would send whole shards.
            first = str(self.path / "store.json")
            if len(self._request("store.json", lambda files: files.cat_file(first, 0, 1))) != 1:
                raise StorageError(f"{self.path}: the server ignores ranges. Use another server, or copy the store.")
            self._has_ranges = True
        runs: list[list[int]] = []
        for number in numbers:
            if runs and number == runs[-1][-1] + 1 and len(runs[-1]) < MAX_REQUEST // BLOCK:
                runs[-1].append(number)
            else:
                runs.append([number])
        blocks: dict[int, bytes] = {}

        def request(files: Any) -> None:
            """Fetch the blocks that are still missing, so that a retry transfers less."""
            missing = [run for run in runs if run[0] not in blocks]
            starts = [run[0] * BLOCK for run in missing]
            ends = [min((run[-1] + 1) * BLOCK, size) for run in missing]
            problem: Exception | None = None
            answers = files.cat_ranges([path] * len(missing), starts, ends, on_error="return")
            for run, start, end, answer in zip(missing, starts, ends, answers):
                if isinstance(answer, Exception):
                    problem = answer
                elif len(answer) != end - start:
                    problem = OSError(f"{len(answer)} bytes instead of {end - start}")
                else:
                    for i, number in enumerate(run):
                        blocks[number] = bytes(answer[i * BLOCK : (i + 1) * BLOCK])
            if problem is not None:
                raise problem

        self._request(name, request)
        return blocks

    def _request(self, name: str, request: Callable[[Any], R]) -> R:
        """Run a request, with up to two retries of transient errors."""
        self._start_process()
        for pause in (*PAUSES, None):
            problem: BaseException
            try:
                return request(self._files)
            except FileNotFoundError as error:
                # fsspec reports any failure of `info` over HTTP as a missing file.
                cause = error.__cause__
                if self.path.scheme not in ("http", "https") or cause is None or _http_status(cause) in (404, 410):
                    raise FileNotFoundError(errno.ENOENT, "no such object", str(self.path / name)) from None
                problem = cause
            except self._failures as error:
                problem = error
            status = _http_status(problem.__cause__ or problem)
            text = next(iter(str(problem).strip().splitlines()), "") or type(problem).__name__
            if isinstance(problem, PermissionError) or status in (401, 403):
                raise StorageError(f"{self.path / name}: {text}. Check the credentials and their rights.") from None
            if pause is None or (400 <= status < 500 and status not in (408, 429)):
                break
            log.warning("%s: %s; trying again in %g s", self.path / name, text, pause)
            time.sleep(pause)
        raise StorageError(
            f"{self.path / name}: {text}. Check the network, the address and the credentials, or try later."
        )


def _http_status(error: BaseException) -> int:
    """Return the HTTP status of an error of aiohttp or botocore, or 0."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    status = getattr(error, "status", 0)
    return status if isinstance(status, int) else 0


class BlockCache:
    """A cache of blocks in a folder that all processes of a machine share, with a limit in bytes.

    A checksum detects incomplete blocks. The least recently used blocks are removed first.
    """

    _NAME = re.compile(r"[0-9a-f]{32}")
    _DRAFT = re.compile(r"\.[0-9a-f]{32}\.[0-9a-f]{8}")

    def __init__(self, folder: Path, limit: float) -> None:
        self.folder, self.limit = folder, limit
        # Bytes written since the last check of the size. The first block triggers a check.
        self._new = limit
        self._failed = False

    @staticmethod
    def from_environment() -> "BlockCache | None":
        """Open the folder WARPFOLD_CACHE (default: ~/.cache/warpfold/objects) with a limit of WARPFOLD_CACHE_GB.

        Returns None if the limit is 0 or there is no home folder. Raises UserError if WARPFOLD_CACHE_GB is not a
        number.
        """
        gigabytes = os.environ.get("WARPFOLD_CACHE_GB", "") or str(CACHE_GB)
        try:
            limit = float(gigabytes) * 1e9
        except ValueError:
            limit = float("nan")
        if not 0 <= limit < 1e18:
            raise UserError(f"WARPFOLD_CACHE_GB={gigabytes}: not a number of gigabytes. Use 0 for no cache.")
        if not limit:
            return None
        if folder := os.environ.get("WARPFOLD_CACHE"):
            return BlockCache(Path(folder), limit)
        if not (caches := os.environ.get("XDG_CACHE_HOME")):
            home = os.path.expanduser("~")
            if home == "~":
                log.warning(
                    "there is no home folder: objects are read without a cache. Set WARPFOLD_CACHE to a folder."
                )
                return None
            caches = f"{home}/.cache"
        return BlockCache(Path(caches) / "warpfold" / "objects", limit)

    def get(self, key: str) -> bytes | None:
        """Return a block, or None if it is missing or incomplete."""
        path = self._path(key)
        try:
            data = path.read_bytes()
            # The modification time records the last use of the block.
            if time.time() - path.stat().st_mtime > 60:
                os.utime(path)
        except OSError:
            return None
        if zlib.crc32(data[:-4]).to_bytes(4, "little") != data[-4:]:
            self.drop(key)
            return None
        return data[:-4]

    def put(self, key: str, data: bytes) -> None:
        """Write a block. If the folder cannot be written, log a warning once and continue without the cache."""
        if self._failed:
            return
        path = self._path(key)
        draft = path.with_name(f".{key}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(data + zlib.crc32(data).to_bytes(4, "little"))
            draft.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            self._failed = True
            log.warning("%s: cannot be written: %s; objects are read without a cache", self.folder, error.strerror)
            return
        self._new += len(data)
        if self._new > self.limit * CHECK_FRACTION:
            self._new = 0.0
            self._make_room()

    def drop(self, key: str) -> bool:
        """Remove a block. Returns whether it existed."""
        try:
            self._path(key).unlink()
        except OSError:
            return False
        return True

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key

    def _make_room(self) -> None:
        """Remove the oldest blocks until 90 % of the limit are used, unless another process is doing this."""
        with contextlib.suppress(OSError), open(self.folder / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            blocks, size = [], 0
            for path in self.folder.glob("[0-9a-f][0-9a-f]/*"):
                stat = path.stat()
                if self._NAME.fullmatch(path.name):
                    blocks.append((stat.st_mtime, stat.st_size, path))
                    size += stat.st_size
                elif self._DRAFT.fullmatch(path.name) and stat.st_mtime < time.time() - 3600:
                    path.unlink()  # from a killed process
            if size > self.limit:
                for _, freed, path in sorted(blocks):
                    if size <= 0.9 * self.limit:
                        break
                    path.unlink(missing_ok=True)
                    size -= freed
