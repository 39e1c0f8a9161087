"""What the standard library reads of the world for a model: such calls run live."""

from __future__ import annotations

import argparse
import array
import bz2
import calendar
import codecs
import configparser
import contextlib
import csv
import ctypes
import datetime
import decimal
import fileinput
import gc
import getopt
import glob
import gzip
import hashlib
import importlib
import inspect
import io
import json
import linecache
import logging
import lzma
import mmap
import optparse
import os
import pickle
import re
import resource
import shelve
import shutil
import signal
import sqlite3
import string
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import tokenize
import tomllib
import types
import xml.etree.ElementTree as ET
import zipfile
import zlib
from collections.abc import Callable, Iterator
from ctypes import c_int
from io import FileIO
from mmap import mmap as mapped_file
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import bendtrace as bt

PLACE = Path(tempfile.gettempdir()) / f"bendtrace_outside_{os.getpid()}"
FILE = str(PLACE / "file")
VARIABLE = "BENDTRACE_OUTSIDE"
HANDLER = "outside"
OPENERS: dict[str, Any] = {"raw": io.FileIO, "text": tokenize.open}
cell = c_int(2)
address = ctypes.addressof(cell)
lock, plain_lock, event = threading.RLock(), threading.Lock(), threading.Event()


class Keeper:
    kind = io.FileIO

    def __init__(self) -> None:
        self.opener: Any = io.FileIO

    def read(self) -> int:
        return len(self.opener(FILE).read())

    def read_of_class(self) -> int:
        return len(self.kind(FILE).read())


class Pair(ctypes.Structure):
    _fields_ = (("a", c_int),)


keeper = Keeper()


def write(text: bytes) -> None:
    Path(FILE).write_bytes(text)


def arguments(*texts: str) -> None:
    sys.argv[1:] = texts


def ini() -> float:
    parser = configparser.ConfigParser()
    parser.read(FILE)
    return parser.getfloat("a", "k")


def parsed() -> float:
    parser = argparse.ArgumentParser()
    parser.add_argument("--k", type=float)
    return float(parser.parse_args().k)


def parsed_by_optparse() -> float:
    parser = optparse.OptionParser()
    parser.add_option("--k", type=float)
    return float(parser.parse_args()[0].k)


def rows() -> int:
    with contextlib.closing(sqlite3.Connection(FILE)) as base:
        return len(base.execute("select * from a").fetchall())


def fill(count: int) -> None:
    with contextlib.closing(sqlite3.connect(FILE)) as base, base:
        base.execute("create table if not exists a (k)")
        base.executemany("insert into a values (?)", [(1,)] * count)


def mapped() -> float:
    with Path(FILE).open("r+b") as file:
        return float(mmap.mmap(file.fileno(), 1)[:1])


DESCRIPTOR: list[int] = []


def mapped_before() -> float:
    return float(mapped_file(DESCRIPTOR[0], 1)[:1])


def open_descriptor() -> None:
    write(b"2")
    DESCRIPTOR[:] = [os.open(FILE, os.O_RDWR)]


def stored() -> int:
    with shelve.open(FILE) as shelf:
        return int(shelf["k"])


def store(k: int) -> None:
    with shelve.open(FILE) as shelf:
        shelf["k"] = k


def zipped(text: str) -> None:
    with zipfile.ZipFile(FILE, "w") as archive:
        archive.writestr("a", text)


def handle_short(error: UnicodeError) -> tuple[str, int]:
    return "a", error.end  # type: ignore[attr-defined]


def handle_long(error: UnicodeError) -> tuple[str, int]:
    return "aaa", error.end  # type: ignore[attr-defined]


def decoded_by_type() -> int:
    return len(str(b"\xff", "ascii", "outside"))


def limit_core(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (size, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def level_named() -> int:
    return len(logging.getLevelName(7))


class Case(NamedTuple):
    """What a model reads, and how that is one thing before some calls and another after.

    Attributes:
        read: what the model reads.
        first: what is done before.
        then: what is done afterwards.
    """

    read: Callable[[], Any]
    first: Callable[[], Any] = lambda: write(b"2")
    then: Callable[[], Any] = lambda: write(b"222")


CASES: dict[str, Case] = {
    "configparser": Case(ini, lambda: write(b"[a]\nk=2"), lambda: write(b"[a]\nk=3")),
    "argparse": Case(parsed, lambda: arguments("--k", "2"), lambda: arguments("--k", "3")),
    "argparse, a file": Case(lambda: len(argparse.FileType()(FILE).read())),
    "optparse": Case(
        parsed_by_optparse, lambda: arguments("--k", "2"), lambda: arguments("--k", "3")
    ),
    "getopt": Case(
        lambda: len(getopt.getopt(sys.argv[1:], "ab")[0]),
        lambda: arguments("-a"),
        lambda: arguments("-a", "-b"),
    ),
    "argv": Case(lambda: len(sys.argv), lambda: arguments("a"), lambda: arguments("a", "b")),
    "fileinput": Case(lambda: len("".join(fileinput.input([FILE])))),
    "tokenize": Case(lambda: len(tokenize.open(FILE).read())),
    "bz2": Case(
        lambda: len(bz2.open(FILE).read()),
        lambda: write(bz2.compress(b"1")),
        lambda: write(bz2.compress(b"11")),
    ),
    "BZ2File": Case(
        lambda: len(bz2.BZ2File(FILE).read()),
        lambda: write(bz2.compress(b"1")),
        lambda: write(bz2.compress(b"11")),
    ),
    "lzma": Case(
        lambda: len(lzma.open(FILE).read()),
        lambda: write(lzma.compress(b"1")),
        lambda: write(lzma.compress(b"11")),
    ),
    "gzip": Case(
        lambda: len(gzip.open(FILE).read()),
        lambda: write(gzip.compress(b"1")),
        lambda: write(gzip.compress(b"11")),
    ),
    "FileIO": Case(lambda: len(io.FileIO(FILE).read())),
    "FileIO of another name": Case(lambda: len(FileIO(FILE).readall())),
    "FileIO by name": Case(lambda: len(getattr(io, "FileIO")(FILE).read())),  # noqa: B009
    "FileIO in a table": Case(lambda: len(OPENERS["raw"](FILE).read())),
    "FileIO of an object": Case(keeper.read),
    "FileIO of a class": Case(keeper.read_of_class),
    "FileIO mapped": Case(lambda: len(next(iter(map(io.FileIO, [FILE]))).read())),
    "BufferedReader": Case(lambda: len(io.BufferedReader(io.FileIO(FILE)).read())),
    "io.open": Case(lambda: len(io.open(FILE).read())),  # noqa: UP020
    "open_code": Case(lambda: len(io.open_code(FILE).read())),
    "os.open": Case(lambda: len(os.read(os.open(FILE, os.O_RDONLY), 9))),
    "codecs.open": Case(lambda: len(codecs.open(FILE).read())),
    "Path": Case(lambda: len(Path(FILE).read_text())),
    "csv": Case(
        lambda: len(list(csv.reader(Path(FILE).open()))),
        lambda: write(b"1"),
        lambda: write(b"1\n2"),
    ),
    "json": Case(
        lambda: json.load(Path(FILE).open()), lambda: write(b"2"), lambda: write(b"3")
    ),
    "pickle": Case(
        lambda: pickle.load(Path(FILE).open("rb")),
        lambda: write(pickle.dumps(2)),
        lambda: write(pickle.dumps(3)),
    ),
    "tomllib": Case(
        lambda: tomllib.load(Path(FILE).open("rb"))["k"],
        lambda: write(b"k=2"),
        lambda: write(b"k=3"),
    ),
    "xml": Case(
        lambda: len(list(ET.parse(FILE).getroot())),
        lambda: write(b"<a><b/></a>"),
        lambda: write(b"<a><b/><b/></a>"),
    ),
    "zipfile": Case(
        lambda: len(zipfile.ZipFile(FILE).read("a")), lambda: zipped("1"), lambda: zipped("11")
    ),
    "shelve": Case(stored, lambda: store(2), lambda: store(3)),
    "linecache": Case(lambda: len([*linecache.getlines(FILE), linecache.checkcache(FILE)])),
    "glob": Case(
        lambda: len(glob.glob(f"{PLACE}/*")), then=lambda: (PLACE / "another").write_text("")
    ),
    "getsize": Case(lambda: os.path.getsize(FILE)),
    "digest": Case(lambda: hashlib.file_digest(Path(FILE).open("rb"), "md5").digest()[0]),
    "sqlite3.Connection": Case(rows, lambda: fill(1), lambda: fill(1)),
    "sqlite3.connect": Case(
        lambda: len(sqlite3.connect(FILE).execute("select * from a").fetchall()),
        lambda: fill(1),
        lambda: fill(1),
    ),
    "mmap": Case(mapped, lambda: write(b"2"), lambda: write(b"3")),
    "mmap of a descriptor": Case(
        mapped_before, open_descriptor, lambda: os.pwrite(DESCRIPTOR[0], b"3", 0)
    ),
    "ctypes, a pointer": Case(
        lambda: ctypes.c_int.from_address(address).value,
        lambda: setattr(cell, "value", 2),
        lambda: setattr(cell, "value", 5),
    ),
    "ctypes, a structure": Case(
        lambda: Pair.from_address(address).a,
        lambda: setattr(cell, "value", 2),
        lambda: setattr(cell, "value", 5),
    ),
    "ctypes, cast": Case(
        lambda: ctypes.cast(address, ctypes.POINTER(c_int))[0],
        lambda: setattr(cell, "value", 2),
        lambda: setattr(cell, "value", 5),
    ),
    "ctypes, a text": Case(
        lambda: ctypes.string_at(address, 1)[0],
        lambda: setattr(cell, "value", 2),
        lambda: setattr(cell, "value", 5),
    ),
    "ctypes, an array": Case(
        lambda: (c_int * 1).from_address(address)[0],
        lambda: setattr(cell, "value", 2),
        lambda: setattr(cell, "value", 5),
    ),
    "ctypes, an object": Case(
        lambda: cell.value,
        lambda: setattr(cell, "value", 2),
        lambda: setattr(cell, "value", 5),
    ),
    "RLock": Case(lambda: 2 if lock._is_owned() else 3, int, lock.acquire),  # type: ignore[attr-defined]
    "Lock": Case(lambda: 2 if plain_lock.locked() else 3, int, plain_lock.acquire),
    "Lock, acquired": Case(
        lambda: 2 if plain_lock.acquire(blocking=False) and not plain_lock.release() else 3,
        int,
        plain_lock.acquire,
    ),
    "Event": Case(lambda: 2 if event.is_set() else 3, event.clear, event.set),
    "environb": Case(
        lambda: 2 if os.environb.get(VARIABLE.encode()) else 3,
        int,
        lambda: os.environ.update({VARIABLE: "1"}),
    ),
    "environb, a key": Case(
        lambda: len(os.environb[VARIABLE.encode()]),
        lambda: os.environ.update({VARIABLE: "1"}),
        lambda: os.environ.update({VARIABLE: "111"}),
    ),
    "getenvb": Case(
        lambda: len(os.getenvb(VARIABLE.encode(), b"")),
        int,
        lambda: os.environ.update({VARIABLE: "1"}),
    ),
    "expandvars": Case(
        lambda: len(os.path.expandvars(f"${VARIABLE}")),
        lambda: os.environ.update({VARIABLE: "1"}),
        lambda: os.environ.update({VARIABLE: "111"}),
    ),
    "template": Case(
        lambda: len(string.Template("$a").substitute(a=os.environ.get(VARIABLE, ""))),
        int,
        lambda: os.environ.update({VARIABLE: "111"}),
    ),
    "level": Case(
        level_named, lambda: logging.addLevelName(7, "a"), lambda: logging.addLevelName(7, "aa")
    ),
    "error handler": Case(
        lambda: len("\xff".encode("ascii", "outside")),
        lambda: codecs.register_error("outside", handle_short),
        lambda: codecs.register_error("outside", handle_long),
    ),
    "error handler by keyword": Case(
        lambda: len(b"\xff".decode("ascii", errors="outside")),
        lambda: codecs.register_error("outside", handle_short),
        lambda: codecs.register_error("outside", handle_long),
    ),
    "error handler by variable": Case(
        lambda: max(len(b"\xff".decode("ascii", errors=name)) for name in (HANDLER,)),
        lambda: codecs.register_error("outside", handle_short),
        lambda: codecs.register_error("outside", handle_long),
    ),
    "error handler of str": Case(
        decoded_by_type,
        lambda: codecs.register_error("outside", handle_short),
        lambda: codecs.register_error("outside", handle_long),
    ),
    "error handler of a type": Case(
        lambda: len(str.encode("\xff", "ascii", "outside")),
        lambda: codecs.register_error("outside", handle_short),
        lambda: codecs.register_error("outside", handle_long),
    ),
    "error handler looked up": Case(
        lambda: 2 if codecs.lookup_error("outside") is handle_short else 3,
        lambda: codecs.register_error("outside", handle_short),
        lambda: codecs.register_error("outside", handle_long),
    ),
    "source": Case(
        lambda: len(inspect.getsource(made())), lambda: make("1"), lambda: make("1 + 1")
    ),
    "fstat": Case(lambda: os.stat(FILE).st_size),
    "tempfile": Case(
        lambda: len(tempfile.gettempdir()),
        lambda: setattr(tempfile, "tempdir", "/tmp"),
        lambda: setattr(tempfile, "tempdir", None),
    ),
    "subprocess": Case(lambda: len(subprocess.check_output(["cat", FILE]))),
    "signal": Case(
        lambda: 2 if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL else 3,
        lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL),
        lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    ),
    "resource": Case(
        lambda: resource.getrlimit(resource.RLIMIT_CORE)[0] + 2, then=lambda: limit_core(0)
    ),
    "gc": Case(
        lambda: gc.get_threshold()[0],
        lambda: gc.set_threshold(700),
        lambda: gc.set_threshold(701),
    ),
    "recursion limit": Case(
        lambda: sys.getrecursionlimit(), then=lambda: sys.setrecursionlimit(1001)
    ),
    "import_module": Case(lambda: len(importlib.import_module("io").FileIO(FILE).read())),
}  # fmt: skip


def made() -> Any:
    return MADE[0]


MADE: list[Any] = []


def make(text: str) -> None:
    path = PLACE / "source.py"
    path.write_text(f"def f():\n    return {text}\n")
    linecache.clearcache()
    space: dict[str, Any] = {"__name__": "outside_source"}
    exec(compile(path.read_text(), str(path), "exec"), space)
    MADE[:] = [space["f"]]


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    PLACE.mkdir(exist_ok=True)
    for path in PLACE.iterdir():
        path.unlink()
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.delenv(VARIABLE, raising=False)
    limit, threshold, folder = sys.getrecursionlimit(), gc.get_threshold(), tempfile.tempdir
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    yield
    os.environ.pop(VARIABLE, None)
    sys.setrecursionlimit(limit)
    gc.set_threshold(*threshold)
    tempfile.tempdir = folder
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, limits)
    event.clear()
    cell.value = 2
    for held in (lock, plain_lock):
        with contextlib.suppress(RuntimeError):
            held.release()
    shutil.rmtree(PLACE)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", CASES)
def test_what_the_standard_library_reads_is_read_each_time(name: str) -> None:
    case = CASES[name]

    def model(x: Tensor) -> Tensor:
        return x * float(case.read())

    case.first()
    bended = bt.BendedModule(model)
    before = model(torch.ones(1))
    for _ in range(3):
        assert bended(torch.ones(1)) == before
    case.then()
    after = model(torch.ones(1))
    for _ in range(2):
        assert bended(torch.ones(1)) == after


STEADY: dict[str, Callable[[Tensor], Any]] = {
    "decimal": lambda x: x * float(decimal.Decimal("1.5")),
    "datetime": lambda x: x * datetime.date(2020, 1, 2).day,
    "struct": lambda x: x * struct.unpack("i", struct.pack("i", 3))[0],
    "StringIO": lambda x: x * len(io.StringIO("abc").read()),
    "BytesIO": lambda x: x * len(io.BytesIO(b"abc").getvalue()),
    "re": lambda x: x * len(re.sub("a", "b", "aaa")),
    "json": lambda x: x * len(json.dumps({"a": [1]})),
    "text": lambda x: x * len("abc".encode("utf-8").decode("ascii", "replace")),  # noqa: UP012
    "array": lambda x: x * array.array("i", [3])[0],
    "zlib": lambda x: x * len(zlib.compress(b"abc")),
    "textwrap": lambda x: x * len(textwrap.wrap("a b c", 1)),
    "calendar": lambda x: x * calendar.monthrange(2020, 2)[1],
    "namespace": lambda x: x * types.SimpleNamespace(a=3).a,
    "argparse": lambda x: x * argparse.Namespace(a=3).a,
    "hash": lambda x: x * len(hashlib.md5(b"a").digest()),
}


@pytest.mark.parametrize("name", STEADY)
def test_what_works_on_its_arguments_is_replayed(name: str) -> None:
    bended = bt.BendedModule(STEADY[name])
    for _ in range(3):
        assert torch.equal(bended(torch.ones(2)), STEADY[name](torch.ones(2)))
    assert bended.stats.live == 0, bended.why_live
