"""Logs on disk: entries as rows of JSON, saved values as files of tensors; saving and loading."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

import bendtrace
from bendtrace.errors import BendtraceError, InputError, LoadError, SaveError
from bendtrace.log.building import BoundaryKey, RunData
from bendtrace.log.entries import LayerEntry, ModuleEntry, ParameterUse, Source
from bendtrace.log.mirror import GRAPH_CODEC, flow_rows, flow_steps_of, from_node_link, to_node_link
from bendtrace.log.path_views import Tree
from bendtrace.log.plain import DEVICE, DTYPE, TUPLE, Codec, Plainer, fields_of
from bendtrace.log.run_log import Facts, RunLog
from bendtrace.log.saved_tensors import (
    LOCK,
    DataFile,
    DirectoryLock,
    Extent,
    FileIndex,
    Strided,
    TensorFile,
    code_of,
    free_key,
    header_size,
    layout_of,
    read_json,
    read_sealed,
    replace_sealed,
    row_size,
    shape_in_file,
    sync_directory,
    why_not,
    write_json,
    writing,
)
from bendtrace.python.checks import did_you_mean, required_path
from bendtrace.python.sites import add_cells, cells_among
from bendtrace.tape.tape import map_leaves

T = TypeVar("T")


class RowForm(Generic[T]):
    """Writes instances of one class as rows: an object each, with a key for each field.

    Fields that have their default are left out.
    """

    def __init__(
        self,
        cls: type[T],
        forms: Mapping[str, Plainer],
        codec: Codec,
        without: Collection[str] = (),
    ) -> None:
        self._cls = cls
        self._codec = codec
        self._defaults = {k: v for k, v in fields_of(cls).items() if k not in without}
        self._forms = {name: forms.get(name) for name in self._defaults}

    def write(self, record: T) -> dict[str, Any]:
        """Return a row."""
        row = {}
        for name, default in self._defaults.items():
            value = getattr(record, name)
            if type(value) is not type(default) or value != default:
                row[name] = self._codec.write(self._forms[name], value)
        return row

    def read(self, row: Mapping[str, Any]) -> T:
        """Return the instance that a row describes."""
        read, forms = self._codec.read, self._forms
        return self._cls(**{name: read(forms[name], data) for name, data in row.items()})

    def read_all(self, rows: Iterable[Mapping[str, Any]]) -> list[T]:
        """Return the instances that rows describe."""
        return [self.read(row) for row in rows]


_SOURCES = RowForm(Source, {}, GRAPH_CODEC)
_USES = RowForm(ParameterUse, {"shape": TUPLE}, GRAPH_CODEC)
_SOURCE = Plainer(Source, lambda _, value: _SOURCES.write(value), lambda _, row: _SOURCES.read(row))
_PARAMETERS = Plainer(
    list, lambda _, uses: list(map(_USES.write, uses)), lambda _, rows: _USES.read_all(rows)
)
LAYERS = RowForm(
    LayerEntry,
    {
        "element": TUPLE,
        "shape": TUPLE,
        "dtype": DTYPE,
        "device": DEVICE,
        "state": _PARAMETERS,
        "scopes": TUPLE,
        "output_of": TUPLE,
        "source": _SOURCE,
        "flow": TUPLE,
    },
    GRAPH_CODEC,
    without=("saved", "gradient"),
)
MODULES = RowForm(ModuleEntry, {"source": _SOURCE, "flow": TUPLE}, GRAPH_CODEC)
FACTS = RowForm(Facts, {}, GRAPH_CODEC)


_SHARD_BYTES = 1 << 32


class _Slot:
    """Stands in a value for tensor number `number`."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


_CODEC = Codec((), {"tensor": (_Slot, lambda slot: slot.number, _Slot)})


def write_values(draft: Draft, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Write values by name: tensors, handles of such, or containers with some inside.

    Files are named by the kind, "activations". The places of the content are ready for JSON.
    """
    found: list[tuple[str, Tensor | StoredTensor]] = []
    rows: list[dict[str, Any]] = []
    written = []
    for name, value in values.items():
        slots: list[tuple[str, Tensor | StoredTensor | NotSaved]] = []
        plain = _take_out(value, name, slots, len(rows), ())
        for inner, tensor in slots:
            if isinstance(tensor, NotSaved):
                rows.append({"not_saved": tensor.reason})
            elif isinstance(tensor, Tensor) and (reason := why_not(tensor)) is not None:
                dtype = str(tensor.dtype).removeprefix("torch.")
                rows.append({"not_saved": reason, "dtype": dtype, "device": str(tensor.device)})
            else:
                rows.append({})
                found.append((inner, tensor))
        written.append([_CODEC.encode(name), _CODEC.encode(plain)])
    stored = _write_tensors(draft, kind, found)
    for row in rows:
        if not row:
            row.update(next(stored))
    return {"tensors": rows, "values": written}


def _take_out(value: Any, name: str, slots: list[Any], first: int, around: tuple[int, ...]) -> Any:
    """Replace each tensor of a value by a slot. What contains itself is left to the codec."""
    if isinstance(value, StoredValue):
        value = value.value
    if isinstance(value, (Tensor, StoredTensor, NotSaved)):
        slots.append((name, value))
        return _Slot(first + len(slots) - 1)
    if type(value) not in (tuple, list, dict) or id(value) in around or len(around) > 50:
        return value
    around = (*around, id(value))
    if type(value) is dict:
        return {
            key: _take_out(item, f"{name}[{key!r}]", slots, first, around)
            for key, item in value.items()
        }
    return type(value)(
        _take_out(item, f"{name}[{position}]", slots, first, around)
        for position, item in enumerate(value)
    )


def _write_tensors(
    draft: Draft, kind: str, tensors: list[tuple[str, Tensor | StoredTensor]]
) -> Iterator[dict[str, Any]]:
    """Write tensors to as many files as it takes; yield a row for each."""
    with outside_modes():
        shards: list[list[tuple[str, Strided, Tensor | StoredTensor]]] = []
        size = _SHARD_BYTES
        taken: set[str] = set()
        for name, tensor in tensors:
            layout = tensor.layout if isinstance(tensor, StoredTensor) else layout_of(tensor)
            if not shards or size + layout.nbytes > _SHARD_BYTES:
                shards.append([])
                size = 0
                taken = set()
            key = free_key(name, taken)
            taken.add(key)
            size += layout.nbytes
            shards[-1].append((key, layout, tensor))
        rows = []
        for number, shard in enumerate(shards, 1):
            file_name = f"{kind}-{number:05d}.safetensors"
            path = draft.path(file_name)
            file = TensorFile(path, header_size([(key, layout) for key, layout, _ in shard]))
            for key, layout, tensor in shard:
                content = tensor.read() if isinstance(tensor, StoredTensor) else tensor
                extent = file.add(key, layout, content)
                rows.append(row_of(path, extent, layout, tensor.device))
            draft.add_tensors(file_name, file.close())
    return iter(rows)


def read_values(
    index: Mapping[str, Any],
    files: Mapping[str, tuple[DataFile, FileIndex]],
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Return what `write_values` wrote, by name."""
    values = {}
    rows = index["tensors"]
    for name, data in index["values"]:
        name, value = _CODEC.decode(name), _CODEC.decode(data)
        handles: list[StoredTensor | NotSaved] = []

        def handle(slot: _Slot, name: str = name, handles: list[Any] = handles) -> Any:
            handles.append(tensor_handle(name, rows[slot.number], files, device))
            return handles[-1]

        stored = _replace(value, _Slot, handle)
        is_inside = bool(handles) and not isinstance(value, _Slot)
        values[name] = StoredValue(stored) if is_inside else stored
    return values


@dataclass(frozen=True, eq=False)
class StoredValue:
    """A container with tensors on disk."""

    value: Any

    def read(self) -> Any:
        """Read it: each call gives new tensors."""
        return _replace(self.value, StoredTensor, StoredTensor.read)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredValue:
        return self


def _replace(value: Any, kind: type[T], replacement: Callable[[T], Any]) -> Any:
    """Return a value in which each object of a class is replaced."""
    return map_leaves(value, lambda leaf: replacement(leaf) if isinstance(leaf, kind) else leaf)


def save(history: RunLog, directory: str | os.PathLike[str]) -> None:
    """Write a log to disk: all of it, with the activations and gradients that it holds.

    Args:
        history: a log, or a trace.
        directory: where to. It is made if there is none. A save that is there is replaced in one
            step, when the new one is complete: whatever happens before, it stays as it was.

    Raises:
        SaveError: if the directory holds something other than a save, another save to it is going
            on, or it cannot be written to.
        LoadError: if the log was loaded, and an activation of it cannot be read any more.

    Example:
        >>> import tempfile, torch, bendtrace as bt
        >>> history = bt.trace(torch.nn.ReLU(), torch.tensor([-1.0, 1.0]), save="all")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     history.save(directory)
        ...     bt.load(directory)["relu_1"].tensor_contents
        tensor([0., 1.])
    """
    encode = GRAPH_CODEC.encode
    history._count_flops()  # without the run, nobody can
    log, entries = history._log, history.entries
    about = {"bendtrace": bendtrace.__version__, "torch": str(torch.__version__)}
    with draft_in(os.path.abspath(required_path("directory", directory)), about) as draft:
        content = {
            "name": encode(log.name),
            "parameters": log.parameters,
            "parameter_bytes": log.parameter_bytes,
            "facts": FACTS.write(history._facts),
            "entries": list(map(LAYERS.write, entries)),
            "modules": list(map(MODULES.write, history.modules)),
            "cells": cells_among(_source_files(history)),
        }
        draft.write_json("log.json", content)
        flow = {
            "steps": flow_rows(history.flow_steps, GRAPH_CODEC),
            "labels": encode(list(history.step_labels)),
            "guards": encode(history.guard_rows()),
        }
        draft.write_json("flow.json", flow)
        draft.write_json("graph.json", to_node_link(history.graph))
        draft.write_json("tree.json", encode(history._tree.to_dict()))
        activations = {e.label: e.saved for e in entries if e.saved is not None}
        gradients = {e.label: e.gradient for e in entries if e.gradient is not None}
        values = {
            "activations": write_values(draft, "activations", activations),
            "gradients": write_values(draft, "gradients", gradients),
            "passed": _write_boundary_entries(draft, log),
        }
        draft.write_json("tensors.json", values)


def _source_files(history: RunLog) -> set[str]:
    sources = [*(e.source for e in history.entries), *(call.source for call in history.modules)]
    places = [place for node in history._tree.data.walk() for place in node.places]
    return {one.file for one in (*sources, *places, *history.flow_steps) if one is not None}


def _write_boundary_entries(draft: Draft, log: RunData) -> dict[str, Any]:
    """Write values that modules received or returned in place of other entries."""
    own = {id(entry) for entry in log.entries}
    values: dict[str, Any] = {}
    names: dict[int, str] = {}
    rows = []
    for key, entry in log.boundary_entries.items():
        if id(entry) not in own and id(entry) not in names:
            name = names[id(entry)] = f"{entry.label} {len(names)}"
            values[name] = entry.saved if not entry.unsaved else NotSaved(entry.unsaved)
        rows.append([*key, entry.label, names.get(id(entry))])
    return write_values(draft, "passed", values) | {"rows": GRAPH_CODEC.encode(rows)}


def _read_boundary_entries(
    index: Mapping[str, Any],
    entries: Mapping[str, LayerEntry],
    files: Mapping[str, tuple[DataFile, FileIndex]],
    device: torch.device | None,
) -> dict[BoundaryKey, LayerEntry]:
    made: dict[str, tuple[Any, str]] = {}
    for name, value in read_values(index, files, device).items():
        made[name] = (None, value.reason) if isinstance(value, NotSaved) else (value, "")
    found: dict[BoundaryKey, LayerEntry] = {}
    for call, way, named, label, name in GRAPH_CODEC.decode(index["rows"]):
        entry = entries[label]
        if name is not None:
            saved, unsaved = made[name]
            entry = replace(entry, saved=saved, unsaved=unsaved, gradient=None)
        found[call, way, named] = entry
    return found


def load(directory: str | os.PathLike[str], *, device: torch.device | str | None = None) -> RunLog:
    """Read a log that was saved. The model is not needed, and no code of its is run.

    Activations and gradients stay on disk: each `entry.tensor_contents` reads one again. A
    value that could not be stored is None, and `entry.unsaved` says why.

    Args:
        directory: where it was saved to.
        device: where tensors are read to; None for the CPU, wherever they were.

    Raises:
        LoadError: if there is no save, or it is damaged, unfinished, of another program, or of a
            newer version of the format. A damaged activation is noticed when it is read.

    Example:
        >>> import tempfile, torch, bendtrace as bt
        >>> from bendtrace.storage import load, save
        >>> history = bt.trace(torch.nn.ReLU(), torch.tensor([-1.0, 1.0]), save="all")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save(history, directory)
        ...     loaded = load(directory)
        >>> str(loaded) == str(history)
        True
    """
    try:
        to = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{device!r} is not a device: {error}") from None
    directory = os.path.abspath(required_path("directory", directory))
    while True:
        opened = open_manifest(directory)
        try:
            return _load(opened, to)
        except LoadError:
            # Another save may have taken its place, and deleted it, while it was being read.
            if open_manifest(directory).manifest == opened.manifest:
                raise


def _load(opened: Opened, device: torch.device | None) -> RunLog:
    decode = GRAPH_CODEC.decode
    contents, flow, graph, tree, tensors = (
        opened.read_json(f"{name}.json") for name in ("log", "flow", "graph", "tree", "tensors")
    )
    files = open_files(opened.folder, opened.headers)
    try:
        add_cells(contents.get("cells", {}))
        log = RunData(
            decode(contents["name"]),
            LAYERS.read_all(contents["entries"]),
            MODULES.read_all(contents["modules"]),
            flow_steps_of(flow["steps"], GRAPH_CODEC),
            decode(flow["labels"]),
            contents["parameters"],
            contents["parameter_bytes"],
        )
        entries: dict[str, LayerEntry] = {}
        for entry in log.entries:
            entries[entry.label] = entry
            if entry.index is not None:
                log.places.setdefault((entry.index, entry.element), entry)
        for label, value in read_values(tensors["activations"], files, device).items():
            if isinstance(value, NotSaved):
                entries[label].unsaved = value.reason
            else:
                entries[label].saved = value
        for label, value in read_values(tensors["gradients"], files, device).items():
            entries[label].gradient = value
        if "passed" in tensors:  # else it was written by a version that did not know it
            log.boundary_entries = _read_boundary_entries(tensors["passed"], entries, files, device)
        facts = FACTS.read(contents["facts"])
        rows = decode(flow["guards"])
        return RunLog(log, Tree.from_dict(decode(tree)), from_node_link(graph), facts, rows)
    except (BendtraceError, LookupError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, LoadError):
            raise
        # The checksums are right: it is as it was written, but not by this format's rules.
        raise LoadError(opened.folder, f"what it says makes no sense: {error}") from error


# The directory of a save: how it is exchanged as a whole, and what is recognised as ours.
#
# A save consists of `bendtrace.json` and one folder `data-...` that it names. A new save is
# written to a folder of its own, and takes effect in one step: when its `bendtrace.json` takes
# the place of the old one. At no moment is there neither the old nor the new.

MANIFEST = "bendtrace.json"
FORMAT = "bendtrace log"
VERSION = 1
_DATA = re.compile(r"data-[0-9a-f]{12}")


class Draft:
    """A save that is being written."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.files: dict[str, dict[str, Any]] = {}

    def path(self, name: str) -> str:
        """Return where a file of the save goes."""
        return os.path.join(self.folder, name)

    def write_json(self, name: str, value: Any) -> None:
        """Add a file of JSON."""
        size, sha256 = write_json(self.path(name), value)
        self.files[name] = {"size": size, "sha256": sha256}

    def add_tensors(self, name: str, header: str) -> None:
        """Note a file of tensors that was written."""
        size = os.path.getsize(self.path(name))
        self.files[name] = {"size": size, "header_sha256": header}


@contextmanager
def draft_in(directory: str, about: dict[str, Any]) -> Iterator[Draft]:
    """Write a save: the body fills it, and at the end it takes the place of the one before.

    If the body fails, an earlier save stays as it was.
    """
    with writing(directory):
        _require_ours(directory)
        with _directory_at(directory), ExitStack() as stack:
            stack.callback(DirectoryLock(directory).release)
            _require_ours(directory)
            _clean(directory)
            draft = Draft(os.path.join(directory, f"data-{secrets.token_hex(6)}"))
            try:
                os.mkdir(draft.folder)
                yield draft
                sync_directory(draft.folder)
                manifest = {
                    "format": FORMAT,
                    "version": VERSION,
                    **about,
                    "data": os.path.basename(draft.folder),
                    "files": draft.files,
                }
                replace_sealed(os.path.join(directory, MANIFEST), manifest, draft.path(MANIFEST))
            except BaseException:
                has_effect = False
                with suppress(LoadError):
                    has_effect = _manifest(directory)["data"] == os.path.basename(draft.folder)
                if not has_effect:
                    shutil.rmtree(draft.folder, ignore_errors=True)
                raise
            _clean(directory)


@contextmanager
def _directory_at(directory: str) -> Iterator[None]:
    """Make a directory and those above it. If the body fails, remove those that are empty."""
    missing: list[str] = []
    path = directory
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        os.mkdir(path)
        sync_directory(os.path.dirname(path))
    try:
        yield
    except BaseException:
        for path in missing:
            with suppress(OSError):
                os.rmdir(path)
        raise


def _require_ours(directory: str) -> None:
    """Refuse a folder that saving has not made."""
    if not os.path.lexists(directory):
        return
    if not os.path.isdir(directory):
        raise SaveError(directory, "it is a file; a save is a directory")
    names = os.listdir(directory)
    if MANIFEST in names:
        try:
            _manifest(directory)
        except LoadError as error:
            if not error.is_newer:
                raise SaveError(
                    directory, f"its {MANIFEST} is not a save, or is damaged; delete it first"
                ) from error
    elif others := [n for n in names if not _DATA.fullmatch(n) and not is_streamed(n)]:
        shown = ", ".join(sorted(others)[:3]) + ", ..." * (len(others) > 3)
        raise SaveError(
            directory, f"it is not a save and holds other files ({shown}); choose another directory"
        )


def _manifest(directory: str) -> dict[str, Any]:
    manifest = read_sealed(os.path.join(directory, MANIFEST), FORMAT, VERSION)
    if not _DATA.fullmatch(str(manifest.get("data"))) or type(manifest.get("files")) is not dict:
        raise LoadError(os.path.join(directory, MANIFEST), "the file is damaged")
    return manifest


def _clean(directory: str) -> None:
    """Delete the remains of dead saves, and the save that was replaced."""
    current = None
    if os.path.lexists(os.path.join(directory, MANIFEST)):
        try:
            current = _manifest(directory)["data"]
        except LoadError:
            return  # a newer version may have folders of its own
    for name in os.listdir(directory):
        if _DATA.fullmatch(name) and name != current:
            shutil.rmtree(os.path.join(directory, name), ignore_errors=True)


class Opened:
    """A save that is being read."""

    def __init__(self, directory: str, manifest: dict[str, Any]) -> None:
        self.directory = directory
        self.manifest = manifest
        self.folder: str = os.path.join(directory, manifest["data"])

    def read_json(self, name: str) -> Any:
        """Return the content of a JSON file."""
        row = self.manifest["files"].get(name)
        path = os.path.join(self.folder, name)
        if row is None:
            raise LoadError(path, "the file is missing")
        return read_json(path, row["size"], row["sha256"])

    @property
    def headers(self) -> dict[str, str]:
        """For each file of tensors the checksum of its header."""
        files = self.manifest["files"].items()
        return {name: row["header_sha256"] for name, row in files if "header_sha256" in row}


def open_manifest(directory: str) -> Opened:
    """Find the save in a directory."""
    if not os.path.isdir(directory):
        if os.path.lexists(directory):
            raise LoadError(directory, "it is a file; a save is a directory")
        raise LoadError(directory, f"there is no such directory{_near_directories(directory)}")
    names = os.listdir(directory)
    if MANIFEST in names:
        return Opened(directory, _manifest(directory))
    if STREAM in names and is_unfinished(directory):
        raise LoadError(
            directory,
            "a run was writing its activations there and did not finish; nothing was saved",
        )
    if STREAM in names:
        raise LoadError(
            directory,
            f"it holds a {STREAM_FORMAT} of activations, but the log was not saved there;"
            " bendtrace.storage.read_stream reads the activations",
        )
    if names and all(name == LOCK or _DATA.fullmatch(name) for name in names):
        raise LoadError(directory, "the first save to it was interrupted: nothing is complete")
    raise LoadError(directory, f"it is not a save of bendtrace: there is no {MANIFEST}")


def _near_directories(directory: str) -> str:
    folder, name = os.path.split(directory)
    if not os.path.isdir(folder):
        return f", nor {folder!r}"
    return did_you_mean(name, sorted(os.listdir(folder)))


# Activations on disk while a run is going on, and handles that read them back.


@dataclass(frozen=True)
class NotSaved:
    """Stands for a value that could not be stored."""

    reason: str  # why

    def __str__(self) -> str:
        return f"not saved: {self.reason}"


@dataclass(frozen=True, eq=False, repr=False)
class StoredTensor:
    """A tensor on disk."""

    name: str
    layout: Strided  # its dtype, shape and strides
    device: torch.device  # where it was when it was stored
    file: DataFile  # the file that it is in
    extent: Extent  # where in the file
    to: torch.device | None = None  # the device that it is read to; None for the CPU

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.layout.dtype

    @property
    def nbytes(self) -> int:
        """The number of bytes on disk."""
        return self.layout.nbytes

    def read(self, device: torch.device | str | None = None) -> Tensor:
        """Read it: each call gives a new tensor, which needs no gradient.

        Args:
            device: where to; None for `to`.

        Raises:
            LoadError: if the file was damaged since.
        """
        with outside_modes():
            tensor = self.file.tensor(self.extent, self.layout)
            device = self.to if device is None else device
            return tensor if device is None else tensor.to(device)

    def __repr__(self) -> str:
        about = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        return f"<StoredTensor {self.name!r}: {about} in {os.path.basename(self.file.path)}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        return self  # nothing about it can change


@contextmanager
def outside_modes() -> Iterator[None]:
    """Return a context that modes of torch, such as a recording run, do not see."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def row_of(path: str, extent: Extent, layout: Strided, device: torch.device) -> dict[str, Any]:
    """Return the row of a stored tensor, ready for JSON."""
    return {
        "file": os.path.basename(path),
        "key": extent.key,
        "crc32": extent.checksum,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "shape": list(layout.shape),
        "strides": list(layout.strides),
        "device": str(device),
    }


def open_files(
    directory: str, checksums: Mapping[str, str]
) -> dict[str, tuple[DataFile, FileIndex]]:
    """Open files of tensors and examine their headers."""
    files = {}
    for name, checksum in checksums.items():
        if os.path.basename(name) != name:
            raise LoadError(directory, f"it names a file outside: {name!r}")
        file = DataFile(os.path.join(directory, name))
        header = file.header()
        if header.sha256 != checksum:
            raise LoadError(file.path, "the file is damaged: its header has changed")
        files[name] = file, header
    return files


def tensor_handle(
    name: str,
    row: Mapping[str, Any],
    files: Mapping[str, tuple[DataFile, FileIndex]],
    to: torch.device | None = None,
) -> StoredTensor | NotSaved:
    """Return the handle that a row of `row_of` describes."""
    if "not_saved" in row:
        return NotSaved(row["not_saved"])
    dtype = getattr(torch, row["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        return NotSaved(f"it is of type {row['dtype']}, which this torch does not have")
    layout = Strided(dtype, tuple(row["shape"]), tuple(row["strides"]))
    numbers = (*layout.shape, *layout.strides)
    if len(layout.shape) != len(layout.strides) or not all(
        type(number) is int and number >= 0 for number in numbers
    ):
        raise ValueError(f"{name!r} has the shape {row['shape']} and strides {row['strides']}")
    file, header = files[row["file"]]
    code, shape, start, stop = header.extents[row["key"]]
    found = code, shape, stop - start
    if found != (code_of(dtype), shape_in_file(layout), layout.nbytes):
        raise ValueError(f"what is said of {name!r} is not what the file holds")
    extent = Extent(row["key"], start, layout.nbytes, row["crc32"])
    device = torch.device("cpu")
    with suppress(RuntimeError):  # it is of a kind that this torch does not have
        device = torch.device(row["device"])
    return StoredTensor(name, layout, device, file, extent, to)


STREAM = "stream.json"
STREAM_FORMAT = "bendtrace stream"
STREAM_VERSION = 1
_HEADER = 1 << 18  # room for about 2000 tensors; a shard is closed when it is used up


class ShardWriter:
    """Writes tensors to disk as they come, and keeps none of them in memory.

    The directory then holds `shard-00001.safetensors` and so on, and `stream.json`, which tells
    what is where. As long as the writer is not closed, it says that the stream is unfinished.

    Args:
        directory: where to. It is made if there is none, and must be empty, or hold nothing but
            what is left of a stream that was interrupted.
        max_bytes: a shard is closed, and the next one begun, before it grows beyond this.

    Raises:
        SaveError: if the directory holds something else, or cannot be written to.

    Example:
        >>> import tempfile, torch
        >>> from bendtrace.storage import ShardWriter
        >>> with tempfile.TemporaryDirectory() as directory, ShardWriter(directory) as writer:
        ...     stored = writer.add("relu_1", torch.ones(2, 3).relu())
        ...     stored.read().sum()
        tensor(6.)
    """

    def __init__(self, directory: str | os.PathLike[str], *, max_bytes: int = 1 << 32) -> None:
        if type(max_bytes) is not int or max_bytes < 1:
            raise InputError(f"max_bytes has to be a positive number of bytes, not {max_bytes!r}")
        self.directory: str = os.path.abspath(required_path("directory", directory))
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._file: TensorFile | None = None
        self._reader: DataFile | None = None
        self._headers: dict[str, str] = {}
        self._rows: dict[str, Any] = {}
        self._closed = False
        with writing(self.directory):
            os.makedirs(self.directory, exist_ok=True)
            self._directory_lock = DirectoryLock(self.directory)
            try:
                _make_room(self.directory)
                self._mark("open")
            except BaseException:
                self._directory_lock.release()
                raise

    def add(self, name: str, tensor: Tensor) -> StoredTensor | NotSaved:
        """Write a tensor.

        Args:
            name: what to call it: a name that was not used yet.
            tensor: what to write. It is not changed, nor kept.

        Returns:
            A handle that reads it back, also before the writer is closed; or why it cannot be
            stored: it is sparse, quantised, nested, on the meta device, or of a subclass.

        Raises:
            InputError: if the name was used before, or the writer is closed.
            SaveError: if the file cannot be written, such as on a full disk.
        """
        with self._lock, outside_modes():
            if self._closed:
                raise InputError(f"the stream to {self.directory!r} is closed")
            if name in self._rows:
                raise InputError(f"{name!r} was already written to {self.directory!r}")
            reason = why_not(tensor)
            if reason is not None:
                self._rows[name] = {"not_saved": reason}
                return NotSaved(reason)
            layout = layout_of(tensor)
            with writing(self.directory):
                file, reader = self._room_for(name, layout)
                extent = file.add(free_key(name, file), layout, tensor)
            self._rows[name] = row_of(reader.path, extent, layout, tensor.device)
            return StoredTensor(name, layout, tensor.device, reader, extent)

    def close(self) -> None:
        """Finish the files; a second call does nothing.

        Raises:
            SaveError: if they cannot be written. The directory then says that it is unfinished.
        """
        with self._lock:
            if not self._closed:
                with writing(self.directory):
                    self._close_shard()
                    self._mark("closed", files=self._headers, tensors=self._rows)
                self._closed = True
                self._directory_lock.release()

    def _room_for(self, name: str, layout: Strided) -> tuple[TensorFile, DataFile]:
        file = self._file
        # Room for a name that has to be made unique is left in any case.
        key = f"{name}#{len(self._rows)}".encode("unicode_escape").decode()
        if file is not None and len(file):
            full = file.size + layout.nbytes > self._max_bytes or not file.takes(key, layout)
            if full:
                self._close_shard()
                file = None
        if file is None or self._reader is None:
            path = os.path.join(self.directory, f"shard-{len(self._headers) + 1:05d}.safetensors")
            file = self._file = TensorFile(path, max(_HEADER, 2 * row_size(key, layout)))
            self._reader = DataFile(path)
        return file, self._reader

    def _close_shard(self) -> None:
        if self._file is not None:
            self._headers[os.path.basename(self._file.path)] = self._file.close()
            self._file = self._reader = None

    def _mark(self, state: str, **content: Any) -> None:
        marker = {"format": STREAM_FORMAT, "version": STREAM_VERSION, "state": state, **content}
        path = os.path.join(self.directory, STREAM)
        replace_sealed(path, marker, f"{path}.new")

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:  # the directory goes on saying that it is unfinished
            self._directory_lock.release()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<ShardWriter to {self.directory!r}: {len(self._rows)} tensors, {state}>"


def _make_room(directory: str) -> None:
    names = [name for name in os.listdir(directory) if name != LOCK]
    if not names:
        return
    if not is_unfinished(directory) or not all(map(is_streamed, names)):
        what = "a finished stream" if STREAM in names else "other files"
        raise SaveError(directory, f"it is not empty but holds {what}; choose another directory")
    for name in names:
        os.remove(os.path.join(directory, name))


def is_streamed(name: str) -> bool:
    """Return whether a file in a directory is one that a `ShardWriter` writes."""
    is_shard = name.startswith("shard-") and name.endswith(".safetensors")
    return is_shard or name in (STREAM, f"{STREAM}.new", LOCK)


def is_unfinished(directory: str) -> bool:
    """Return whether a directory holds a stream that was interrupted, or is still being written."""
    try:
        marker = read_sealed(os.path.join(directory, STREAM), STREAM_FORMAT, STREAM_VERSION)
    except LoadError:
        return False
    return marker.get("state") == "open"


def read_stream(directory: str | os.PathLike[str]) -> dict[str, StoredTensor | NotSaved]:
    """Return the values that a `ShardWriter` wrote, by name.

    Args:
        directory: where it wrote to.

    Raises:
        LoadError: if there is no stream, or it was interrupted, or is damaged.

    Example:
        >>> import tempfile, torch
        >>> from bendtrace.storage import ShardWriter, read_stream
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with ShardWriter(directory) as writer:
        ...         _ = writer.add("relu_1", torch.ones(2, 3).relu())
        ...     read_stream(directory)["relu_1"].read()
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """
    directory = os.path.abspath(required_path("directory", directory))
    path = os.path.join(directory, STREAM)
    marker = read_sealed(path, STREAM_FORMAT, STREAM_VERSION)
    if marker.get("state") != "closed":
        raise LoadError(directory, "a run was writing its activations there and did not finish")
    try:
        files = open_files(directory, marker["files"])
        return {name: tensor_handle(name, row, files) for name, row in marker["tensors"].items()}
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, LoadError):
            raise
        raise LoadError(path, f"the file is damaged: {error}") from None
