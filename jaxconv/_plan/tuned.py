"""What was tuned on this device (`jaxconv.tune`, or in place): exact problems, their times, and which was chosen.

Results are a JSON file of the user's, of which JAXCONV_TUNING names another. It is read once, when the first plan is
made, merged and replaced as a whole when something is added. Which results hold is part of the key of JAX's caches, so
that a function compiled with some and one compiled with others are two programs. What was timed in place is not: a
program that is compiled is the first to take it, and need not be compiled again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import platform as host
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jaxlib

from jaxconv._core import compat
from jaxconv._plan.plan import Device

try:
    import fcntl
except ImportError:  # not a Unix: writers of one file are not kept apart
    fcntl = None  # type: ignore[assignment]

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """One problem's times on one device."""

    op: str  # "conv_dgrad"
    key: str  # the exact problem, as `key_of` writes it
    problem: str  # the same for people
    device: str  # as `device_name` says
    jaxlib: str  # "0.10": times of another one are not these
    jaxconv: str
    xla_ms: float | None  # None: XLA could not run it
    native_ms: Mapping[str, float]  # by kernel and tile, as `Plan.spec` names them
    choice: str | None  # "xla", or one of native_ms; None: the times are known, and nothing is chosen by them
    driver: str = ""  # for people
    timer: str = ""  # "cupti" or "wall"
    when: str = ""  # UTC, "2026-11-26 10:30"
    # The problem was timed alone, in place: no function has confirmed the choice
    alone: bool = False
    pass_ms: float = 0.0  # of a forward convolution timed in place: to write its result once

    @property
    def ratio(self) -> float | None:
        """XLA's time over the choice's."""
        ms = self.xla_ms if self.choice == "xla" else self.native_ms.get(self.choice or "")
        return self.xla_ms / ms if ms and self.xla_ms else None

    @property
    def identity(self) -> tuple[str, ...]:
        return self.op, self.key, self.device, self.jaxlib, self.jaxconv


class Results:
    """An immutable set of entries, one for each problem, device and version. Equal sets are equal keys."""

    def __init__(self, entries: Iterable[Entry] = (), source: str = "", named: bool = True):
        self.entries = tuple({e.identity: e for e in entries}.values())
        self.source = source  # where it was read, for messages
        self._named = named  # somebody chose these results; the user's own file is only there
        self._text = "\n".join(sorted(json.dumps(dataclasses.asdict(e), sort_keys=True) for e in self.entries))
        self._hash = hash(self._text)
        self._by_device: dict[str, dict[tuple[str, str], Entry]] = {}

    def __eq__(self, other: object) -> bool:
        if self is other:  # nearly always, and JAX asks at each call of a compiled function
            return True
        return isinstance(other, Results) and self._hash == other._hash and self._text == other._text

    def __hash__(self) -> int:
        return self._hash

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"<{len(self)} tuned problems{f' of {self.source}' if self.source else ''}>"

    def updated(self, entries: Iterable[Entry]) -> Results:
        return Results((*self.entries, *entries), self.source, self._named)

    def on(self, device: str) -> dict[tuple[str, str], Entry]:
        """The entries that hold on a device with the versions of this process; warns once of what does not."""
        if device not in self._by_device:
            here = [e for e in self.entries if e.device == device]
            fresh = [e for e in here if (e.jaxlib, e.jaxconv) == versions()]
            self._by_device[device] = {(e.op, e.key): e for e in fresh}
            what = f"{self.source or 'the tuning results'}: "
            if len(fresh) < len(here):
                old = next(e for e in here if (e.jaxlib, e.jaxconv) != versions())
                _warn(
                    f"{what}{len(here) - len(fresh)} problems were tuned with other versions (jaxlib {old.jaxlib}, "
                    f"jaxconv {old.jaxconv}; here are {versions()[0]} and {versions()[1]}) and are ignored: tune again"
                )
            elif self.entries and not here and self._named:
                others = ", ".join(sorted({e.device for e in self.entries}))
                _warn(f"{what}its problems were tuned on {others}, and are ignored on {device}")
        return self._by_device[device]


# ----------------------------------------------------------------------------------------------------------------------
# What an entry is found by


def key_of(problem: Any) -> str:
    """The exact problem: all of it but the public function's name and what the user forces."""
    return repr(dataclasses.replace(problem, name="", implementation=None, algorithm=None))


@functools.cache
def versions() -> tuple[str, str]:
    """(jaxlib's major and minor version, jaxconv's)."""
    return ".".join(jaxlib.__version__.split(".")[:2]), importlib.metadata.version("jaxconv")


def device_name(device: Device) -> str:
    """ "NVIDIA H200"; of a CPU its model and how many of its cores the process may use."""
    return _cpu_name() if device.platform == "cpu" else device.kind


@functools.cache
def _cpu_name() -> str:
    model = host.processor() or host.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        model = found[1].strip() if found else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores"


@functools.cache
def driver() -> str:
    """The NVIDIA driver's version; "" where it is not known."""
    with contextlib.suppress(OSError):
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", pathlib.Path("/proc/driver/nvidia/version").read_text())
        return found[0] if found else ""
    return ""


def now() -> str:
    """As entries say it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")


# ----------------------------------------------------------------------------------------------------------------------
# Text and files


def dumps(results: Results) -> str:
    """As JSON, an entry a line."""
    lines = ",\n".join("  " + json.dumps(dataclasses.asdict(e)) for e in results.entries)
    return f'{{\n "format": {FORMAT},\n "entries": [\n{lines}\n ]\n}}\n'


def loads(text: str, source: str = "", named: bool = True) -> Results:
    """The results that `dumps` wrote; ValueError where the text is something else, with what is wrong."""
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:  # the latter of brackets in thousands of brackets
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("entries"), list):
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"not tuning results of format {FORMAT}: found {found!r}")
    return Results([_entry(i, e) for i, e in enumerate(data["entries"])], source, named)


_FIELDS = {field.name for field in dataclasses.fields(Entry)}
_STRINGS = ("op", "key", "problem", "device", "jaxlib", "jaxconv")


def _entry(i: int, e: Any) -> Entry:
    try:
        entry = Entry(**{name: value for name, value in e.items() if name in _FIELDS})
        times = [*entry.native_ms.values(), *([] if entry.xla_ms is None else [entry.xla_ms])]
        good = all(isinstance(getattr(entry, name), str) for name in _STRINGS)
        good = good and all(isinstance(ms, (int, float)) and 0 <= ms < math.inf for ms in times)
        good = good and isinstance(entry.when, str) and isinstance(entry.pass_ms, (int, float)) and entry.pass_ms >= 0
        if good and (entry.choice in (None, "xla") or entry.choice in entry.native_ms):
            return entry
    except (AttributeError, TypeError):
        pass
    raise ValueError(f"entry {i} is no tuned problem: {str(e)[:100]}")


def path() -> pathlib.Path:
    """The user's file: JAXCONV_TUNING, or tuning.json in the user's data folder."""
    named = os.environ.get("JAXCONV_TUNING")
    if named:
        return pathlib.Path(named).expanduser()
    try:
        import platformdirs
    except ImportError:
        xdg = os.environ.get("XDG_DATA_HOME", "")  # to be ignored where it is relative, say its rules
        folder = pathlib.Path(xdg) if os.path.isabs(xdg) else pathlib.Path("~/.local/share").expanduser()
        return folder / "jaxconv" / "tuning.json"
    return pathlib.Path(platformdirs.user_data_dir("jaxconv", appauthor=False)) / "tuning.json"


def read(file: pathlib.Path, named: bool | None = None) -> Results:
    """What a file holds; none where there is none. A broken one is named in a warning and holds none. `named`: whether
    somebody chose these results; None is whether JAXCONV_TUNING names a file."""
    return _read(file, named)[0]


def _read(file: pathlib.Path, named: bool | None = None) -> tuple[Results, bool]:
    """(the file's results, whether it can be read)."""
    named = bool(os.environ.get("JAXCONV_TUNING")) if named is None else named
    try:
        text = file.read_text()
        return (loads(text, str(file), named) if text else Results((), str(file), named)), True
    except FileNotFoundError:
        return Results((), str(file), named), True
    except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        _warn(f"{file} cannot be read and is ignored, jaxconv's own tables are used: {error}")
        return Results((), str(file), named), False


def save(entries: Iterable[Entry], file: pathlib.Path) -> Results:
    """Adds entries to a file, in place of older ones for the same problems, and returns all that it now holds.

    Safe with several processes: writers wait for each other, and readers find the old file or the new one. A broken
    file is kept beside it under its name and `.broken`.

    Raises:
      OSError: where it cannot be written.
    """
    if file.exists() and not file.is_file():
        raise OSError(f"{file} is no regular file")
    file.parent.mkdir(parents=True, exist_ok=True)
    target = file.resolve()  # a link stays one
    with _locked(target.with_name(target.name + ".lock")):
        before, good = _read(target)
        if not good:
            os.replace(target, target.with_name(target.name + ".broken"))
        merged = before.updated(entries)
        temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")  # the lock's holder is the only one here
        try:
            with open(temporary, "w") as out:
                out.write(dumps(merged))
                out.flush()
                os.fsync(out.fileno())
            if target.exists():  # shared as before
                os.chmod(temporary, target.stat().st_mode & 0o777)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return Results(merged.entries, str(file), merged._named)


@contextlib.contextmanager
def _locked(lock: pathlib.Path) -> Iterator[None]:
    with open(lock, "a") as held:
        if fcntl is not None:
            fcntl.flock(held, fcntl.LOCK_EX)  # closing releases it
        yield


def _warn(text: str) -> None:
    """Once for each text."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(f"jaxconv: {text}", stacklevel=2)


_warned: set[str] = set()


# ----------------------------------------------------------------------------------------------------------------------
# Which hold

# None: those of the user's file as it was when the first plan was made. Part of the key of JAX's caches.
_ACTIVE = jax.make_user_context(default_value=None)

# What was timed in place in this process, or found in the file then: (device, op, key) -> entry
_FOUND: dict[tuple[str, str, str], Entry] = {}


@dataclasses.dataclass(frozen=True)
class _Only:
    """Results beside which nothing holds."""

    results: Results


@functools.cache
def _of_file() -> Results:
    return read(path())


def _given() -> Results:
    """The results that somebody gave, or that are in the user's file."""
    value = _ACTIVE.value
    if isinstance(value, _Only):
        return value.results
    return value if isinstance(value, Results) else _of_file()


def alone() -> bool:
    """Whether plans are made from given results and from nothing else: inside `applied`."""
    return isinstance(_ACTIVE.value, _Only)


def active() -> Results:
    """The results that plans are made from."""
    given = _given()
    if alone() or not _FOUND:
        return given
    known = {e.identity for e in given.entries}
    return given.updated(e for e in list(_FOUND.values()) if e.identity not in known)


def activate(results: Results | None) -> None:
    """From now on these hold, in all threads, but for those inside `applied`; None: those of the user's file."""
    compat.set_global(_ACTIVE, results)


@contextlib.contextmanager
def applied(results: Results) -> Iterator[None]:
    """These hold, and no others, for what this thread traces and compiles in a with-block."""
    with _ACTIVE(_Only(results)):
        yield


def found(one: Entry) -> None:
    """From now on this entry, timed in place, holds in this process beside those that are given."""
    _FOUND[one.device, one.op, one.key] = one


def forget() -> None:
    """What was timed in place in this process is as if it were not; the file is read again."""
    _FOUND.clear()
    _of_file.cache_clear()


def entry(op: str, problem: Any, device: Device) -> Entry | None:
    """The tuned entry of exactly this problem on the device, with this process's versions; or None."""
    results = _given()
    if not device.kind or not (results.entries or _FOUND):
        return None
    name, key = device_name(device), key_of(problem)
    one = results.on(name).get((op, key)) if results.entries else None
    return one if one is not None or alone() else _FOUND.get((name, op, key))
