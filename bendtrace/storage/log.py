"""Logs on disk: entries as rows of JSON, saved values as files of tensors; saving and loading."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

import bendtrace
from bendtrace._places import add_cells, cells_among
from bendtrace._plain import DEVICE, DTYPE, TUPLE, Codec, Form, fields_of
from bendtrace.errors import BendtraceError, InputError, LoadError, SaveError
from bendtrace.graph.export import (
    GRAPH_CODEC,
    flow_rows,
    flow_steps_of,
    from_node_link,
    to_node_link,
)
from bendtrace.history.building import Log, PassedKey
from bendtrace.history.entries import LayerEntry, ModuleEntry, ParameterUse, Source
from bendtrace.history.run_log import Facts, RunLog
from bendtrace.paths.view import Tree
from bendtrace.storage.sealed import (
    LOCK,
    DirectoryLock,
    read_json,
    read_sealed,
    replace_sealed,
    write_json,
    writing,
)
from bendtrace.storage.streams import (
    STREAM,
    STREAM_FORMAT,
    NotSaved,
    StoredTensor,
    is_streamed,
    is_unfinished,
    open_files,
    row_of,
    stored_of,
    undisturbed,
)
from bendtrace.storage.tensors import (
    DataFile,
    Header,
    Layout,
    TensorFile,
    free_key,
    header_size,
    layout_of,
    sync_directory,
    why_not,
)

__all__ = [
    "FACTS",
    "LAYERS",
    "MODULES",
    "Rows",
    "StoredValue",
    "draft_in",
    "load",
    "read_values",
    "save",
    "write_values",
]


T = TypeVar("T")


class Rows(Generic[T]):
    """Writes instances of one class as rows: an object each, with a key for each field.

    Fields that have their default are left out.

    Args:
        cls: a dataclass or named tuple.
        forms: fields that are written in a plainer way than values of any type.
        codec: what the rest is written with.
        without: fields that are not written.
    """

    def __init__(
        self,
        cls: type[T],
        forms: Mapping[str, Form],
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
        """Return the instance that a row describes.

        Raises:
            ValueError: if a value makes no sense.
            LookupError: if there is a field that the class does not have.
            TypeError: if one is missing.
        """
        read, forms = self._codec.read, self._forms
        return self._cls(**{name: read(forms[name], data) for name, data in row.items()})

    def read_all(self, rows: Iterable[Mapping[str, Any]]) -> list[T]:
        """Return the instances that rows describe."""
        return [self.read(row) for row in rows]


def _nested(rows: Rows[Any], cls: type[Any]) -> Form:
    return Form(cls, lambda codec, value: rows.write(value), lambda codec, row: rows.read(row))


def _several(rows: Rows[Any]) -> Form:
    return Form(
        list,
        lambda codec, values: [rows.write(value) for value in values],
        lambda codec, data: rows.read_all(data),
    )


_SOURCE = _nested(Rows(Source, {}, GRAPH_CODEC), Source)
_PARAMETERS = _several(Rows(ParameterUse, {"shape": TUPLE}, GRAPH_CODEC))
LAYERS = Rows(
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
MODULES = Rows(ModuleEntry, {"source": _SOURCE, "flow": TUPLE}, GRAPH_CODEC)
FACTS = Rows(Facts, {}, GRAPH_CODEC)


_SHARD_BYTES = 1 << 32


class _Slot:
    """Stands in a value for tensor number `number`."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


_CODEC = Codec((), {"tensor": (_Slot, lambda slot: slot.number, _Slot)})


def write_values(draft: Draft, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Write values by name: tensors, handles of such, or containers with some inside.

    Args:
        draft: the save.
        kind: what they are, which names the files: "activations".
        values: the values.

    Returns:
        What is where, ready for JSON.
    """
    found: list[tuple[str, Tensor | StoredTensor]] = []
    rows: list[dict[str, Any]] = []
    written = []
    for name, value in values.items():
        slots: list[tuple[str, Tensor | StoredTensor | NotSaved]] = []
        plain = _take_out(value, name, slots, len(rows), ())
        for inner, tensor in slots:
            reason = _reason(tensor)
            rows.append({} if reason is None else {"not_saved": reason, **_about(tensor)})
            if reason is None and not isinstance(tensor, NotSaved):
                found.append((inner, tensor))
        written.append([_CODEC.encode(name), _CODEC.encode(plain)])
    stored = _write(draft, kind, found)
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


def _reason(tensor: Tensor | StoredTensor | NotSaved) -> str | None:
    if isinstance(tensor, NotSaved):
        return tensor.reason
    return None if isinstance(tensor, StoredTensor) else why_not(tensor)


def _about(tensor: Tensor | StoredTensor | NotSaved) -> dict[str, Any]:
    if isinstance(tensor, NotSaved):
        return {}
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "device": str(tensor.device)}


def _write(
    draft: Draft, kind: str, tensors: list[tuple[str, Tensor | StoredTensor]]
) -> Iterator[dict[str, Any]]:
    """Write tensors to as many files as it takes; yield a row for each."""
    with undisturbed():
        shards: list[list[tuple[str, Layout, Tensor | StoredTensor]]] = []
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
    files: Mapping[str, tuple[DataFile, Header]],
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Return what `write_values` wrote, by name.

    Args:
        index: what it returned.
        files: the files that it wrote.
        device: where tensors are to be read to; None for the CPU.

    Returns:
        For each name a `StoredTensor`, a `NotSaved`, a `StoredValue`, or a plain value.

    Raises:
        LookupError: if something is missing.
        ValueError: if it makes no sense.
        TypeError: if a value is of the wrong type.
    """
    values = {}
    rows = index["tensors"]
    for name, data in index["values"]:
        name, value = _CODEC.decode(name), _CODEC.decode(data)
        slots: list[_Slot] = []
        stored = _replaced(value, _Slot, partial(_handle, name, rows, files, device, slots))
        is_inside = bool(slots) and not isinstance(value, _Slot)
        values[name] = StoredValue(stored) if is_inside else stored
    return values


def _handle(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    files: Mapping[str, tuple[DataFile, Header]],
    device: torch.device | None,
    slots: list[_Slot],
    slot: _Slot,
) -> StoredTensor | NotSaved:
    slots.append(slot)
    return stored_of(name, rows[slot.number], files, device)


@dataclass(frozen=True, eq=False)
class StoredValue:
    """A container with tensors on disk.

    Attributes:
        value: the container, with handles in place of the tensors.
    """

    value: Any

    def read(self) -> Any:
        """Read it: each call gives new tensors.

        Raises:
            LoadError: if a file was damaged since.
        """
        return _replaced(self.value, StoredTensor, StoredTensor.read)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredValue:
        return self


def _replaced(value: Any, kind: type[T], replacement: Callable[[T], Any]) -> Any:
    """Return a value with something else for each thing of a kind in it."""
    if isinstance(value, kind):
        return replacement(value)
    if type(value) is dict:
        return {key: _replaced(item, kind, replacement) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_replaced(item, kind, replacement) for item in value)
    return value


def save(history: RunLog, directory: str | os.PathLike[str]) -> None:
    """Write a log to disk: all of it, with the activations and gradients that it holds.

    Args:
        history: a log, or a trace.
        directory: where to. It is made if there is none. A save that is there is replaced in one
            step, when the new one is complete: whatever happens before, it stays as it was.

    Raises:
        SaveError: if the directory holds something that is no save, another save to it is going
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
    with draft_in(os.path.abspath(os.fspath(directory)), about) as draft:
        content = {
            "name": encode(log.name),
            "parameters": log.parameters,
            "parameter_bytes": log.parameter_bytes,
            "facts": FACTS.write(history._facts),
            "entries": list(map(LAYERS.write, entries)),
            "modules": list(map(MODULES.write, history.modules)),
            "cells": cells_among(_files(history)),
        }
        draft.write_json("log.json", content)
        flow = {
            "steps": flow_rows(history.flow_steps, GRAPH_CODEC),
            "labels": encode(list(history.step_labels)),
            "guards": encode(history.guard_rows()),
        }
        draft.write_json("flow.json", flow)
        draft.write_json("graph.json", to_node_link(history.graph))
        draft.write_json("tree.json", encode(_flat(history._tree)))
        activations = {e.label: e.saved for e in entries if e.saved is not None}
        gradients = {e.label: e.gradient for e in entries if e.gradient is not None}
        values = {
            "activations": write_values(draft, "activations", activations),
            "gradients": write_values(draft, "gradients", gradients),
            "passed": _write_passed(draft, log),
        }
        draft.write_json("tensors.json", values)


def _files(history: RunLog) -> set[str]:
    sources = [*(e.source for e in history.entries), *(call.source for call in history.modules)]
    places = [place for node in history._tree.data.walk() for place in node.places]
    return {one.file for one in (*sources, *places, *history.flow_steps) if one is not None}


def _write_passed(draft: Draft, log: Log) -> dict[str, Any]:
    """Write what modules received or returned in the place of other entries."""
    own = {id(entry) for entry in log.entries}
    values: dict[str, Any] = {}
    names: dict[int, str] = {}
    rows = []
    for key, entry in log.passed.items():
        if id(entry) not in own and id(entry) not in names:
            name = names[id(entry)] = f"{entry.label} {len(names)}"
            values[name] = entry.saved if not entry.unsaved else NotSaved(entry.unsaved)
        rows.append([*key, entry.label, names.get(id(entry))])
    return write_values(draft, "passed", values) | {"rows": GRAPH_CODEC.encode(rows)}


def _read_passed(
    index: Mapping[str, Any],
    entries: Mapping[str, LayerEntry],
    files: Mapping[str, tuple[DataFile, Header]],
    device: torch.device | None,
) -> dict[PassedKey, LayerEntry]:
    made: dict[str, tuple[Any, str]] = {}
    for name, value in read_values(index, files, device).items():
        made[name] = (None, value.reason) if isinstance(value, NotSaved) else (value, "")
    found: dict[PassedKey, LayerEntry] = {}
    for call, way, named, label, name in GRAPH_CODEC.decode(index["rows"]):
        entry = entries[label]
        if name is not None:
            saved, unsaved = made[name]
            entry = replace(entry, saved=saved, unsaved=unsaved, gradient=None)
        found[call, way, named] = entry
    return found


def _flat(tree: Tree) -> dict[str, Any]:
    """Return a tree with its nodes as a list, each with the number of the node it belongs to.

    A model that calls itself can have a tree deeper than JSON can be nested.
    """
    nested = tree.to_dict()
    rows: list[list[Any]] = []
    waiting: list[tuple[int | None, dict[str, Any]]] = [(None, nested["root"])]
    while waiting:
        holder, row = waiting.pop()
        waiting.extend((len(rows), child) for child in reversed(row.pop("children", ())))
        rows.append([holder, row])
    return nested | {"root": rows}


def load(directory: str | os.PathLike[str], *, device: torch.device | str | None = None) -> RunLog:
    """Read a log that was saved. The model is not needed, and no code of its is run.

    Activations and gradients stay on disk: each `entry.tensor_contents` reads one anew. What
    could not be stored is None, and `entry.unsaved` says why.

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
        raise InputError(f"{device!r} is no device: {error}") from None
    directory = os.path.abspath(os.fspath(directory))
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
        log = Log(
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
            log.passed = _read_passed(tensors["passed"], entries, files, device)
        facts = FACTS.read(contents["facts"])
        rows = decode(flow["guards"])
        return RunLog(log, _tree_of(decode(tree)), from_node_link(graph), facts, rows)
    except (BendtraceError, LookupError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, LoadError):
            raise
        # The checksums are right: it is as it was written, but not by this format's rules.
        raise LoadError(opened.folder, f"what it says makes no sense: {error}") from error


def _tree_of(flat: dict[str, Any]) -> Tree:
    rows: list[dict[str, Any]] = []
    for holder, row in flat["root"]:
        if holder is not None:
            rows[holder].setdefault("children", []).append(row)
        rows.append(row)
    return Tree.from_dict(flat | {"root": rows[0]})


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
    """A save that is being written.

    Attributes:
        folder: where its files go.
        files: for each file what is known of it.
    """

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
        """Note a file of tensors that was written.

        Args:
            name: its name.
            header: the checksum of its header.
        """
        size = os.path.getsize(self.path(name))
        self.files[name] = {"size": size, "header_sha256": header}


@contextmanager
def draft_in(directory: str, about: dict[str, Any]) -> Iterator[Draft]:
    """Write a save: the body fills it, and at the end it takes the place of the one before.

    If the body fails, what was saved before is as it was.

    Args:
        directory: where to.
        about: what to write in `bendtrace.json`; may be added to by the body.

    Raises:
        SaveError: if the directory holds other things, somebody else saves there, or it cannot
            be written to.
    """
    with writing(directory):
        _require_ours(directory)
        with _made(directory), ExitStack() as stack:
            stack.callback(DirectoryLock(directory).release)
            _require_ours(directory)
            _clean(directory)
            draft = Draft(os.path.join(directory, f"data-{secrets.token_hex(6)}"))
            try:
                os.mkdir(draft.folder)
                yield draft
                _commit(directory, draft, about)
            except BaseException:
                if not _is_current(directory, draft):
                    shutil.rmtree(draft.folder, ignore_errors=True)
                raise
            _clean(directory)


def _commit(directory: str, draft: Draft, about: dict[str, Any]) -> None:
    sync_directory(draft.folder)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        **about,
        "data": os.path.basename(draft.folder),
        "files": draft.files,
    }
    replace_sealed(os.path.join(directory, MANIFEST), manifest, draft.path(MANIFEST))


@contextmanager
def _made(directory: str) -> Iterator[None]:
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
    """Refuse what was not made by saving.

    Raises:
        SaveError: if the directory holds something else.
    """
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
                    directory, f"its {MANIFEST} is no save, or damaged; delete it first"
                ) from error
    elif others := [n for n in names if not _DATA.fullmatch(n) and not is_streamed(n)]:
        shown = ", ".join(sorted(others)[:3]) + ", ..." * (len(others) > 3)
        raise SaveError(
            directory, f"it is no save and holds other files ({shown}); choose another directory"
        )


def _manifest(directory: str) -> dict[str, Any]:
    manifest = read_sealed(os.path.join(directory, MANIFEST), FORMAT, VERSION)
    if not _DATA.fullmatch(str(manifest.get("data"))) or type(manifest.get("files")) is not dict:
        raise LoadError(os.path.join(directory, MANIFEST), "the file is damaged")
    return manifest


def _is_current(directory: str, draft: Draft) -> bool:
    try:
        return bool(_manifest(directory)["data"] == os.path.basename(draft.folder))
    except LoadError:
        return False


def _clean(directory: str) -> None:
    """Delete what dead saves have left, and the save that was replaced."""
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
    """A save that is being read.

    Attributes:
        directory: where it is.
        manifest: what `bendtrace.json` says.
    """

    def __init__(self, directory: str, manifest: dict[str, Any]) -> None:
        self.directory = directory
        self.manifest = manifest
        self.folder: str = os.path.join(directory, manifest["data"])

    def read_json(self, name: str) -> Any:
        """Return what a file of JSON holds.

        Raises:
            LoadError: if it is not there, or not what was written.
        """
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
    """Find the save in a directory.

    Raises:
        LoadError: if there is none, or it is foreign, newer or damaged.
    """
    if not os.path.isdir(directory):
        if os.path.lexists(directory):
            raise LoadError(directory, "it is a file; a save is a directory")
        raise LoadError(directory, f"there is no such directory{_near(directory)}")
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
    raise LoadError(directory, f"it is no save of bendtrace: there is no {MANIFEST}")


def _near(directory: str) -> str:
    folder, name = os.path.split(directory)
    if not os.path.isdir(folder):
        return f", nor {folder!r}"
    near = get_close_matches(name, sorted(os.listdir(folder)), n=3)
    return f"; did you mean {', '.join(map(repr, near))}?" if near else ""
