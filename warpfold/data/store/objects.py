"""Objects behind s3://, gs://, az:// and https://: read in blocks, which a folder of this machine keeps.

The library obstore speaks with the services, and tries again for minutes what fails for a moment.  Credentials and
regions come from where each service's own tools look for them (docs/object_stores.md).
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from warpfold.data.store.storage import Folder, ObjectPath, Place, Storage, local_copy
from warpfold.errors import StorageError, UserError

BLOCK = 1 << 18  # bytes of an object that are read and kept together: two to ten blobs of a store
LARGEST_READ = 1 << 23  # bytes of one request; several are made at once
IN_MEMORY = 64  # blocks that a process keeps in memory, too
AT_ONCE = timedelta(seconds=20)  # for which obstore tries a request again, later and later
PATIENCE = 300.0  # seconds for which we do, where a service that has answered before fails or is gone
SHARE = 256  # of the room for blocks, which a process fills before it looks whether there are too many
LIMIT = 20.0  # GB of blocks on the disk, if WARPFOLD_CACHE_GB does not say so
R = TypeVar("R")
log = logging.getLogger(__name__)


def storage_of(place: Place) -> Storage:
    """Return what reads and writes the objects of a place.  Errors: UserError if a library is missing for that."""
    return Objects(place) if isinstance(place, ObjectPath) else Folder(place)


class Objects:
    """The objects whose names begin with an address; safe to share between threads, and used anew in each process.

    Errors: UserError where obstore is not installed, or the address is none; of all methods `StorageError`, with the
    cause and the cure, for what is not the object's fault, and FileNotFoundError.
    """

    def __init__(self, path: ObjectPath) -> None:
        try:
            import obstore
            import obstore.store
        except ImportError:
            raise UserError(f"{path}: needs the library obstore: pip install 'warpfold[objects]'") from None
        self.path = path
        self._api: Any = obstore
        options: dict[str, Any] = {"client_options": {"timeout": "120s", "allow_http": path.scheme == "http"}}
        if path.scheme == "s3":  # the service compares what it was sent with this
            options["checksum_algorithm"] = "SHA256"
            options["client_options"]["allow_http"] = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
            options |= _profile()
        retries = {"max_retries": 10, "retry_timeout": AT_ONCE}
        try:
            self._client: Any = self._api.store.from_url(str(path), retry_config=retries, **options)
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise UserError(f"{path}: {_first_line(error)}") from None
        self._about: dict[str, tuple[int, str]] = {}  # of objects that do not change: bytes, and what tells versions
        self._answered = False  # the address may be wrong
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._kept = Blocks.usual()

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range, of blocks that are all fetched together."""
        size, tag = self._known(name)
        ranges = [(min(begin, size), min(end, size)) for begin, end in ranges]
        wanted = {i for begin, end in ranges if begin < end for i in range(begin // BLOCK, -(-end // BLOCK))}
        blocks = self._blocks(name, size, tag, sorted(wanted))
        found = []
        for begin, end in ranges:
            first = begin // BLOCK
            joined = b"".join(blocks[i] for i in range(first, -(-end // BLOCK))) if begin < end else b""
            found.append(joined[begin - first * BLOCK : end - first * BLOCK])
        return found

    def whole(self, name: str) -> bytes:
        return self._ask(name, lambda: bytes(self._api.get(self._client, name).bytes()))

    def size(self, name: str) -> int:
        return self._known(name)[0]

    def head(self, name: str) -> Mapping[str, Any]:
        """Ask for size, `e_tag` and `version` of an object as it is now."""
        return self._ask(name, lambda: self._api.head(self._client, name))

    def forget(self, name: str, begin: int, end: int) -> bool:
        tag = self._known(name)[1]
        keys = [self._key(name, tag, number) for number in range(begin // BLOCK, -(-end // BLOCK))]
        with self._lock:
            held = [self._memory.pop(key, None) is not None for key in keys]
        return any([*held, *(self._kept is not None and self._kept.drop(key) for key in keys)])

    def view(self, name: str, size: int, digest: str, checked: bool) -> memoryview:
        return local_copy(self, name, size, digest, checked)

    def cool(self) -> None:
        """Forget the blocks in memory, and read none from the disk any more."""
        self.close()
        self._kept = None

    def close(self) -> None:
        with self._lock:
            self._memory.clear()

    def _known(self, name: str) -> tuple[int, str]:
        if name not in self._about:
            found = self.head(name)
            tag = found["e_tag"] or found["version"] or f"{found['last_modified']}"
            self._about[name] = int(found["size"]), tag
        return self._about[name]

    def _key(self, name: str, tag: str, number: int) -> str:
        return blake2b(json.dumps([str(self.path / name), tag, number]).encode(), digest_size=16).hexdigest()

    def _blocks(self, name: str, size: int, tag: str, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return blocks of an object, those that are not at hand by a few requests at once."""
        found: dict[int, bytes] = {}
        for number in numbers:
            key = self._key(name, tag, number)
            with self._lock:
                block = self._memory.get(key)
                if block is not None:
                    self._memory.move_to_end(key)
            if block is None and self._kept is not None:
                block = self._kept.get(key)
            if block is not None and len(block) == min(BLOCK, size - number * BLOCK):
                found[number] = block
        missing = [number for number in numbers if number not in found]
        runs: list[list[int]] = []  # neighbours, up to the largest request
        for number in missing:
            if runs and number == runs[-1][-1] + 1 and len(runs[-1]) < LARGEST_READ // BLOCK:
                runs[-1].append(number)
            else:
                runs.append([number])
        if runs:
            starts = [run[0] * BLOCK for run in runs]
            ends = [min((run[-1] + 1) * BLOCK, size) for run in runs]
            parts = self._ask(
                name, lambda: self._api.get_ranges(self._client, name, starts=starts, ends=ends, coalesce=0)
            )
            for run, start, end, part in zip(runs, starts, ends, map(bytes, parts)):
                if len(part) != end - start:
                    raise StorageError(f"{self.path / name}: {len(part)} bytes came, {end - start} were asked for")
                for place, number in enumerate(run):
                    found[number] = part[place * BLOCK : (place + 1) * BLOCK]
                    if self._kept is not None:
                        self._kept.put(self._key(name, tag, number), found[number])
        with self._lock:
            for number in missing:
                self._memory[self._key(name, tag, number)] = found[number]
            while len(self._memory) > IN_MEMORY:
                self._memory.popitem(last=False)
        return found

    def _ask(self, name: str, request: Callable[[], R]) -> R:
        """Make a request, again and again where that may help, and say in one line what went wrong with it."""
        exceptions, begun, told = self._api.exceptions, time.monotonic(), False
        while True:
            try:
                found = request()
                self._answered = True
                return found
            except FileNotFoundError as error:
                self._answered = True
                if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                    bucket = self.path.parts[1]
                    raise StorageError(f"{self.path / name}: there is no bucket {bucket}; mend the address") from None
                raise FileNotFoundError(errno.ENOENT, "no such object", str(self.path / name)) from None
            except (exceptions.BaseError, OSError, ValueError) as error:
                reason, may_pass = _reason(error)
                if not may_pass or not self._answered or time.monotonic() - begun > PATIENCE:
                    raise StorageError(f"{self.path / name}: {reason}") from None
                if not told:
                    log.warning("%s: %s; trying again for %.0f s", self.path / name, reason, PATIENCE)
                told = True
                time.sleep(min(5.0, PATIENCE / 10))


def _profile() -> dict[str, Any]:
    """Return credentials by boto3, where it is installed and a profile is chosen; otherwise obstore looks for them."""
    if "AWS_PROFILE" not in os.environ or "AWS_ACCESS_KEY_ID" in os.environ:
        return {}
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise UserError("AWS_PROFILE needs the library boto3: pip install boto3, or set AWS_ACCESS_KEY_ID") from None
    return {"credential_provider": Boto3CredentialProvider()}


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


CURES = {
    "RequestTimeTooSkewed": "set this machine's clock (chronyd or ntpd)",
    "ExpiredToken": "the credentials have expired; get new ones",
    "InvalidAccessKeyId": "the service does not know these credentials",
    "SignatureDoesNotMatch": "the secret key is not that of the access key",
    "AccessDenied": "these credentials may not do this; see the rights of the bucket",
    "SlowDown": "the service is overloaded; start fewer processes, or repeat the command later",
}


def _reason(error: BaseException) -> tuple[str, bool]:
    """Return what a service or the network said, and what to do; and whether it may be otherwise a little later."""
    text = str(error)
    code, said = (next(iter(re.findall(f"<{part}>([^<]*)</{part}>", text)), "") for part in ("Code", "Message"))
    status = next(iter(re.findall(r"status code: (\d+ [A-Z][A-Za-z ]*)", text)), "")
    if not (code or status):
        where = next(iter(re.findall(r"performing \w+ (\w+://[^/ ]+)", text)), "the service")
        causes = re.findall(r'(?:message|error): "([^"]+)"', text) or [_first_line(error).rpartition(" - ")[2]]
        return f"{where} cannot be reached: {causes[-1]}; see the network and the address", True
    denied = status[:3] in ("401", "403") or "AccessDenied" in code
    cure = CURES.get(code, CURES["AccessDenied"] if denied else "repeat the command later")
    words = ": ".join(filter(None, (code or status, " ".join(said.split()).rstrip("."))))
    return f"{words}; {cure}", status[:1] == "5" or status[:3] in ("408", "429")


class Blocks:
    """Copies of blocks in a folder that all processes of a machine share, up to so many bytes.

    Only copies lie here: what is removed can be read again where it came from.  Each has a checksum, so one that a
    power cut has torn is none.  When there are too many, those go that have not been read for longest.
    """

    _NAME = re.compile(r"[0-9a-f]{32}")
    _DRAFT = re.compile(r"\.[0-9a-f]{32}\.[0-9a-f]{8}")

    def __init__(self, folder: Path, limit: float) -> None:
        self.folder, self.limit = folder, limit
        self._new = limit  # bytes since the last look at the folder, which is due at the first block
        self._full = False

    @staticmethod
    def usual() -> "Blocks | None":
        """Open WARPFOLD_CACHE (default: ~/.cache/warpfold/objects), of WARPFOLD_CACHE_GB; None for 0 GB.

        Errors: UserError if that is no number.
        """
        given = os.environ.get("WARPFOLD_CACHE_GB", "") or str(LIMIT)
        try:
            limit = float(given) * 1e9
        except ValueError:
            limit = -1.0
        if not 0 <= limit < 1e18:
            raise UserError(f"WARPFOLD_CACHE_GB={given}: not a number of gigabytes; 0 is for no cache")
        usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warpfold" / "objects"
        return Blocks(Path(os.environ.get("WARPFOLD_CACHE") or usual), limit) if limit else None

    def get(self, key: str) -> bytes | None:
        """Return a block, None if there is none that is whole."""
        path = self._path(key)
        try:
            with open(path, "rb") as file:
                data, stat = file.read(), os.fstat(file.fileno())
            if time.time() - stat.st_mtime > 60:  # what is used stays
                os.utime(path)
        except OSError:
            return None
        if len(data) < 4 or zlib.crc32(data[:-4]).to_bytes(4, "little") != data[-4:]:
            self.drop(key)
            return None
        return data[:-4]

    def put(self, key: str, data: bytes) -> None:
        """Keep a block.  Where that cannot be, say so once, and go on without."""
        if self._full:
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
            self._full = True
            log.warning("%s: cannot be written: %s; objects are read without a cache", self.folder, error.strerror)
            return
        self._new += len(data)
        if self._new > self.limit / SHARE:
            self._new = 0.0
            self._make_room()

    def drop(self, key: str) -> bool:
        """Remove a block; return whether there was one."""
        try:
            self._path(key).unlink()
        except OSError:
            return False
        return True

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key

    def _make_room(self) -> None:
        """Remove what was not read for longest until nine tenths of the room are used, unless another process does."""
        with contextlib.suppress(OSError), open(self.folder / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held, old = [], time.time() - 3600
            for entry in self._entries():
                stat = entry.stat()
                if self._NAME.fullmatch(entry.name):
                    held.append((stat.st_mtime, stat.st_size, entry.path))
                elif stat.st_mtime < old:  # a draft of a process that was killed
                    os.unlink(entry.path)
            size = sum(one for _, one, _ in held)
            if size > self.limit:
                for _, one, path in sorted(held):
                    if size <= 0.9 * self.limit:
                        break
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
                    size -= one

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        """Go through blocks and drafts, and nothing else that may lie in the folder."""
        for group in self.folder.iterdir():
            if len(group.name) == 2 and group.is_dir():
                with os.scandir(group) as entries:
                    yield from (
                        one for one in entries if self._NAME.fullmatch(one.name) or self._DRAFT.fullmatch(one.name)
                    )
