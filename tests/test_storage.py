"""Saving: a loaded log is the same log, damage is noticed, a crash costs nothing."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.log import saved_tensors as tensors
from bendtrace.log.mirror import to_node_link
from bendtrace.log.run_log import RunLog
from bendtrace.log.saved_logs import draft_in
from bendtrace.storage import LoadError, SaveError, ShardWriter, load, save
from tests.corpus import CASES, Case
from tests.stored import FullDisk, assert_same, exact, raw

ROOT = Path(__file__).parent.parent
logged = functools.partial(bt.trace, save="all")


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(3, 3)
        self.words = nn.Embedding(4, 3, sparse=True)

    def forward(self, x: Tensor, tokens: Tensor) -> dict[str, Any]:
        x = x + self.words(tokens)
        while x.norm() > 1:
            x = self.step(x).relu() / 2
        parts = torch.split(x, 1)
        return {"parts": parts, "size": x.shape[0], "mean": x.mean().item()}


def history(seed: int = 0) -> RunLog:
    torch.manual_seed(seed)
    return logged(Steps(), torch.randn(2, 3) * 5, torch.tensor([1, 3]))


def everything(log: RunLog) -> dict[str, Any]:
    """All that a log says, and the bits of what it holds."""
    return {
        "text": log.to_text(None),
        "entries": [str(entry) for entry in log.entries],
        "fields": [
            [
                exact_text(getattr(entry, f.name))
                for f in dataclasses.fields(entry)
                if f.name not in LIVE
            ]
            for entry in log.entries
        ],
        "modules": list(map(repr, log.modules)),
        "flow": [step.to_dict() | {"place": step.place} for step in log.flow_steps],
        "table": log.flow_table,
        "labels": log.step_labels,
        "guards": log.guard_rows(),
        "graph": to_node_link(log.graph),
        "drawn": str(log.graph),
        "tree": (repr(log.tree), log._tree.to_dict()),
        "facts": (log.name, log.seed, log.time, log.why_live),
        "keys": {key: found(log, key) for key in [*log._ipython_key_completions_(), "", "r", -1]},
        "values": values_of(log),
        "gradients": [exact_tensors(entry.grad_contents) for entry in log.entries],
    }


def values_of(log: RunLog) -> list[Any]:
    return [exact_tensors(entry.tensor_contents) for entry in log.entries]


def found(log: RunLog, key: Any) -> str:
    try:
        return repr(log[key])
    except KeyError as error:
        return str(error)


LIVE = ("saved", "gradient")


def exact_text(value: Any) -> tuple[str, str]:
    return type(value).__name__, repr(value)


def exact_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        # Storing closes gaps between elements; the order of the dimensions stays.
        expanded = [stride == 0 for stride in value.stride()]
        return value.shape, value.dtype, expanded, torch.empty_like(value).stride(), raw(value)
    if isinstance(value, (tuple, list)):
        return type(value), list(map(exact_tensors, value))
    if isinstance(value, dict):
        return {key: exact_tensors(item) for key, item in value.items()}
    return exact(value)


def test_a_loaded_log_says_and_holds_the_same_as_the_original(tmp_path: Path) -> None:
    log = history()
    save(log, tmp_path / "log")
    loaded = load(tmp_path / "log")
    assert type(loaded) is RunLog
    assert everything(loaded) == everything(log)
    assert str(loaded) == str(log)
    save(loaded, tmp_path / "again")
    assert everything(load(tmp_path / "again")) == everything(log)


@pytest.mark.parametrize("case", CASES[::8], ids=lambda case: case.name)
def test_logs_of_corpus_models_survive(case: Case, tmp_path: Path) -> None:
    for make in case.paths.values():
        args, kwargs = make()
        try:
            log = logged(case.make(), *args, **kwargs)
        except Exception:  # the model's own: some corpus models raise on some paths
            continue
        save(log, tmp_path / "log")
        assert everything(load(tmp_path / "log")) == everything(log)
        return


def test_gradients_are_saved_too(tmp_path: Path) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    log = logged(nn.Linear(3, 2), x, save_gradients=True)
    log.output.sum().backward()
    save(log, tmp_path / "log")
    found = load(tmp_path / "log")["linear_1"].grad_contents
    assert_same(found, torch.ones(2, 2))


def test_what_a_save_function_made_is_saved_with_its_structure(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.ReLU(), nn.Tanh()), torch.randn(3, 2)
    log = bt.trace(
        model, x, save=lambda entry: (entry.tensor_contents.mean(), {"max": 1.5, 2: [torch.eye(2)]})
    )
    save(log, tmp_path / "log")
    assert everything(load(tmp_path / "log")) == everything(log)
    mean, more = load(tmp_path / "log")["relu_1"].tensor_contents
    assert_same(mean, x.relu().mean())
    assert more["max"] == 1.5
    assert_same(more[2][0], torch.eye(2))


def test_each_look_at_a_loaded_value_gives_a_new_tensor(tmp_path: Path) -> None:
    save(history(), tmp_path / "log")
    entry = load(tmp_path / "log")["input_1"]
    before = entry.tensor_contents
    entry.tensor_contents.zero_()
    assert_same(entry.tensor_contents, before)
    assert before.abs().sum() > 0


def test_values_are_read_to_the_device_asked_for(tmp_path: Path) -> None:
    save(history(), tmp_path / "log")
    loaded = load(tmp_path / "log", device="meta")
    assert loaded["input_1"].tensor_contents.device.type == "meta"
    assert loaded["input_1"].device == torch.device("cpu")
    with pytest.raises(InputError, match="'gpu' is not a device"):
        load(tmp_path / "log", device="gpu")


def test_values_that_cannot_be_stored_say_why(tmp_path: Path) -> None:
    log = logged(lambda x: x.to_sparse() * 2, torch.eye(2))
    save(log, tmp_path / "log")
    loaded = load(tmp_path / "log")
    entry = loaded["tosparse_1"]
    assert (entry.tensor_contents, entry.has_contents) == (None, False)
    assert entry.unsaved == "its layout is torch.sparse_coo"
    assert loaded["input_1"].unsaved == ""
    save(loaded, tmp_path / "again")
    assert load(tmp_path / "again")["tosparse_1"].unsaved == entry.unsaved


def test_values_in_shared_memory_are_stored_one_by_one(tmp_path: Path) -> None:
    log = logged(lambda x: x.view(4)[1:3], torch.arange(4.0).view(2, 2))
    save(log, tmp_path / "log")
    loaded = load(tmp_path / "log")
    assert loaded["getitem_1"].tensor_contents.untyped_storage().nbytes() == 8
    assert_same(loaded["view_1"].tensor_contents, torch.arange(4.0))


def test_a_log_streamed_to_disk_is_saved_from_there(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "stream") as writer:
        log = history()
        for entry in log.entries:
            if isinstance(entry.saved, Tensor):
                entry.saved = writer.add(entry.label, entry.saved)
    expected = everything(history())["values"]
    save(log, tmp_path / "stream")
    assert everything(load(tmp_path / "stream"))["values"] == expected


def test_a_log_loaded_from_where_another_is_saved_keeps_its_values(tmp_path: Path) -> None:
    save(history(0), tmp_path / "log")
    loaded = load(tmp_path / "log")
    save(loaded, tmp_path / "log")
    save(history(1), tmp_path / "log")
    assert everything(loaded)["values"] == everything(history(0))["values"]


@pytest.mark.more
def test_a_log_is_loaded_without_the_model_and_without_pickle(tmp_path: Path) -> None:
    log = history()
    save(log, tmp_path / "log")
    code = f"""
        import sys
        from bendtrace.storage import load

        def watch(event, args):
            if event.startswith("pickle") or event == "import" and args[0].startswith("tests"):
                raise RuntimeError(event)

        sys.addaudithook(watch)
        log = load({str(tmp_path / "log")!r})
        log["embedding_1"].tensor_contents
        print(log.to_text(None))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True,
        cwd=ROOT,
    )  # fmt: skip
    assert done.stdout == log.to_text(None) + "\n"


# Damage


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "log"
    save(history(), path)
    return path


def parts(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def expect_error(path: Path) -> LoadError:
    """Loading, or reading what is loaded, fails in the one way it may."""
    with pytest.raises(LoadError) as caught:
        everything(load(path))
    assert caught.value.path.startswith(str(path))
    assert caught.value.path in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.more
def test_every_damage_gives_one_clear_error(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "log"
    shutil.copytree(saved, path)
    dice = random.Random(0)
    for file in parts(path):
        content = file.read_bytes()
        blank = file.name == "bendtrace.json"  # white space there means nothing
        places = [p for p in range(len(content)) if not (blank and content[p] in b" \n")]
        for place in dice.sample(places, min(len(places), 60)):
            flipped = content[place] ^ (1 << dice.randrange(8))
            file.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
            expect_error(path)
        for length in {0, 1, 7, 8, len(content) // 2, len(content) - (2 if blank else 1)}:
            file.write_bytes(content[:length])
            error = expect_error(path)
            assert any(w in str(error) for w in ("truncated", "damaged", "not finished"))
        file.write_bytes(content + b"x")
        assert "damaged" in str(expect_error(path))
        file.unlink()
        error = expect_error(path)
        assert any(w in str(error) for w in ("is missing", "there is no", "cannot be opened",
                                             "first save to it was interrupted"))  # fmt: skip
        file.write_bytes(content)
    assert everything(load(path)) == everything(load(saved))


def test_a_damaged_activation_leaves_the_others_readable(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "log"
    shutil.copytree(saved, path)
    [file] = path.rglob("activations*")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    loaded = load(path)
    failed = []
    for entry in loaded.entries:
        try:
            _ = entry.tensor_contents
        except LoadError as error:
            failed.append((entry.label, str(error)))
    last = [entry for entry in loaded.entries if entry.has_contents][-1].label
    what = f"the file is damaged: the content of {last!r} has changed"
    assert failed == [(last, f"cannot load {str(file)!r}: {what}")]


def test_a_header_that_was_exchanged_is_noticed_although_it_makes_sense(
    saved: Path, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    shutil.copytree(saved, path)
    [file] = path.rglob("activations*")
    file.write_bytes(file.read_bytes().replace(b'"bendtrace"', b'"bandtrace"', 1))
    safetensors.torch.load_file(file)
    assert "the file is damaged: its header has changed" in str(expect_error(path))


def reseal(path: Path, **changes: Any) -> None:
    """Change a manifest, with a checksum that is right."""
    manifest = json.loads((path / "bendtrace.json").read_text())
    manifest.pop("sha256")
    tensors.replace_sealed(
        str(path / "bendtrace.json"), manifest | changes, str(path.parent / "draft")
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2, "bendtrace": "7.1"}, "was written by bendtrace 7.1 in version 2 of the form"
         "at, and this one reads up to version 1: upgrade bendtrace"),
        ({"format": "onnx"}, "it does not say that it is a bendtrace log"),
        ({"data": "../log"}, "the file is damaged"),
        ({"data": 3}, "the file is damaged"),
        ({"files": []}, "the file is damaged"),
        ({"files": {}}, "log.json': the file is missing"),
        ({"version": "1"}, "the file is damaged"),
    ],
)  # fmt: skip
def test_foreign_and_newer_saves_are_refused(
    saved: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "log"
    shutil.copytree(saved, path)
    reseal(path, **changes)
    assert message in str(expect_error(path))


def test_rows_that_break_the_rules_are_refused_although_their_checksums_are_right(
    saved: Path, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    shutil.copytree(saved, path)
    manifest = json.loads((path / "bendtrace.json").read_text())
    changes: list[tuple[str, Callable[[Any], Any]]] = [
        ("log", lambda log: []),
        ("log", lambda log: log | {"entries": [{"kind": "op"}]}),
        ("log", lambda log: log | {"entries": [{**log["entries"][0], "colour": "red"}]}),
        ("log", lambda log: log | {"name": {"$jump": 1}}),
        ("flow", lambda flow: flow | {"steps": [{}]}),
        ("graph", lambda graph: graph | {"nodes": []}),
        ("tree", lambda tree: tree | {"root": []}),
        ("tensors", lambda t: {**t, "activations": {"values": [["x", {"$tensor": 0}]]}}),
        ("tensors", lambda t: {**t, "gradients": {"tensors": [], "values": [["x", 1]]}}),
    ]  # fmt: skip
    for name, change in changes:
        file = path / manifest["data"] / f"{name}.json"
        content = file.read_bytes()
        file.unlink()
        size, digest = tensors.write_json(str(file), change(json.loads(content)))
        row = {f"{name}.json": {"size": size, "sha256": digest}}
        reseal(path, files=manifest["files"] | row)
        assert "what it says makes no sense" in str(expect_error(path)), name
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no such directory; did you mean 'logs'?"),
        (lambda path: path.write_text("x"), "it is a file; a save is a directory"),
        (lambda path: path.mkdir(), "it is not a save of bendtrace: there is no bendtrace.json"),
        (lambda path: (path / "x").mkdir(parents=True), "it is not a save of bendtrace"),
        (lambda path: (path / "data-0123456789ab").mkdir(parents=True),
         "the first save to it was interrupted: nothing is complete"),
        (lambda path: ShardWriter(path), "a run was writing its activations there and did not f"),
        (lambda path: ShardWriter(path).close(), "it holds a bendtrace stream of activations, but"),
    ],
)  # fmt: skip
def test_what_is_no_save_is_refused_by_what_it_is(
    tmp_path: Path, make: Callable[[Path], Any], message: str
) -> None:
    (tmp_path / "logs").mkdir()
    make(tmp_path / "log")
    assert message in str(expect_error(tmp_path / "log"))


# Where to save


def test_a_save_goes_into_a_directory_that_it_makes(tmp_path: Path) -> None:
    save(history(), tmp_path / "a" / "b")
    assert sorted(os.listdir(tmp_path / "a" / "b"))[0] == "bendtrace.json"
    assert re.fullmatch("data-[0-9a-f]{12}", sorted(os.listdir(tmp_path / "a" / "b"))[1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_text("x"), "it is a file; a save is a directory"),
        (lambda path: (path / "src").mkdir(parents=True),
         "it is not a save and holds other files (src); choose another directory"),
        (lambda path: (path.mkdir(), (path / "bendtrace.json").write_text("{}")),
         "its bendtrace.json is not a save, or is damaged; delete it first"),
        (lambda path: (path.mkdir(), path.chmod(0o500)), None),
    ],
)  # fmt: skip
def test_a_place_that_is_not_for_saves_is_left_alone(
    tmp_path: Path, make: Callable[[Path], Any], message: str | None
) -> None:
    path = tmp_path / "log"
    make(path)
    if message is None and os.access(path, os.W_OK):
        message = None  # the superuser may write anywhere
        save(history(), path)
        return
    before = {file: file.read_bytes() for file in parts(tmp_path)}
    with pytest.raises(SaveError, match=re.escape(message or "Permission denied")) as caught:
        save(history(), path)
    assert caught.value.path == str(path)
    assert {file: file.read_bytes() for file in parts(tmp_path)} == before


def test_files_that_others_put_into_a_save_stay(tmp_path: Path) -> None:
    save(history(), tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    save(history(1), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the other writer is a forked process")
def test_one_process_at_a_time_writes_to_a_directory_until_it_is_killed(tmp_path: Path) -> None:
    reading, writing = os.pipe()

    def write_forever() -> None:
        writer = ShardWriter(tmp_path)
        os.write(writing, b".")
        signal.pause()
        writer.close()

    child = forked(write_forever)
    os.read(reading, 1)
    for write in (lambda: ShardWriter(tmp_path), lambda: save(history(), tmp_path)):
        with pytest.raises(SaveError, match="something else is being saved there right now"):
            write()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    assert tensors.LOCK in os.listdir(tmp_path)
    ShardWriter(tmp_path).close()
    assert os.listdir(tmp_path) == ["stream.json"]


def test_two_saves_to_one_directory_at_once_are_refused(tmp_path: Path) -> None:
    save(history(0), tmp_path / "log")
    with draft_in(str(tmp_path / "log"), {}), pytest.raises(SaveError, match="right now"):
        save(history(1), tmp_path / "log")


def test_a_save_that_fails_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, path = history(), tmp_path / "log"
    for older in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", FullDisk(2000))
            with pytest.raises(SaveError, match="No space left on device"):
                save(log, path)
        assert path.exists() == older
        if older:
            assert everything(load(path)) == everything(log)
            assert len(os.listdir(path)) == 2
        save(log, path)


# Crashes


class Crash:
    """Ends the process at one of the moments when a save changes something on the disk."""

    CALLS = ("open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir")

    def __init__(self, moment: int) -> None:
        self.left = moment
        for name in self.CALLS:
            setattr(os, name, self.wrapped(name, getattr(os, name)))

    def wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                if name == "write":
                    call(args[0], args[1][: len(args[1]) // 2])
                os._exit(9)
            return call(*args, **kwargs)

        return wrapper


def forked(action: Callable[[], None]) -> int:
    """Run something in a process of its own; return its number."""
    with warnings.catch_warnings(action="ignore"):  # newer Pythons warn of threads, if any
        child = os.fork()
    if child:
        return child
    try:
        action()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.all
@pytest.mark.skipif(not hasattr(os, "fork"), reason="crashes are tried in forked processes")
@pytest.mark.parametrize("older", [False, True])
def test_a_crash_at_any_moment_leaves_the_old_save_or_the_new_one(
    tmp_path: Path, older: bool
) -> None:
    path = tmp_path / "log"
    old, new = history(0), history(1)
    old_text, new_values = old.to_text(None), values_of(new)
    states = []
    for moment in range(1, 1000):
        if older:
            save(old, path)
        child = forked(lambda moment=moment: (Crash(moment), save(new, path)))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 9)
        try:
            loaded = load(path)
        except LoadError as error:
            states.append("none")
            reason = str(error)
        else:
            is_new = values_of(loaded) == new_values
            assert is_new or (older and loaded.to_text(None) == old_text)
            states.append("new" if is_new else "old")
        if not older:
            save(old, path)  # what the crash left is no hindrance, and is cleaned up
            assert len(os.listdir(path)) == 2
            shutil.rmtree(path)
        if status == 0:
            break
    assert status == 0
    assert ("none" in states) != older
    assert older or reason.endswith("the first save to it was interrupted: nothing is complete")
    assert states == sorted(states, key=["none", "old", "new"].index)
    assert states.count("old" if older else "none") > 25
    assert states.count("new") > (10 if older else 2)
    if older:
        save(old, path)
        assert len(os.listdir(path)) == 2


@pytest.mark.all
@pytest.mark.skipif(not hasattr(os, "fork"), reason="crashes are tried in forked processes")
def test_a_process_killed_while_saving_leaves_a_complete_save(tmp_path: Path) -> None:
    path = tmp_path / "log"
    logs = [history(0), history(1)]
    values = list(map(values_of, logs))
    save(logs[0], path)
    for count in (1, 2, 5, 17, 40, 111):
        reading, writing = os.pipe()

        def forever(writing: int = writing) -> None:
            sync = os.fsync
            os.fsync = lambda fd: (sync(fd), os.write(writing, b"."))
            while True:
                for log in logs:
                    save(log, path)

        child = forked(forever)
        seen = 0
        while seen < count:
            seen += len(os.read(reading, count - seen))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
        assert values_of(load(path)) in values
    save(logs[1], path)
    assert len(os.listdir(path)) == 2


@pytest.mark.all
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a second process reads while one saves")
def test_a_log_can_be_loaded_while_it_is_being_replaced(tmp_path: Path) -> None:
    path = tmp_path / "log"
    logs = [history(0), history(1)]
    save(logs[0], path)
    texts = {log.to_text(None) for log in logs}

    def replace() -> None:
        while True:
            for log in logs:
                save(log, path)

    child = forked(replace)
    try:
        for _ in range(200):
            assert load(path).to_text(None) in texts
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_loaded_log_says_why_it_cannot_be_replayed(tmp_path: Path) -> None:
    bt.trace(nn.ReLU(), torch.ones(2), save="all").save(tmp_path / "run")
    loaded = bt.load(tmp_path / "run")
    for name in ("replay", "to_fx", "guards"):
        assert not hasattr(loaded, name)
        with pytest.raises(AttributeError, match=f"no attribute '{name}': a loaded log has no mod"):
            getattr(loaded, name)
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        loaded.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_the_structure_of_a_run_is_compared_with_that_of_a_saved_one(tmp_path: Path) -> None:
    def model(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return x * scale if x.sum() > 0 else -x

    bt.trace(model, torch.ones(3), save="all").save(tmp_path / "run")
    same = bt.trace(model, torch.full((3,), 7.0), save="all")  # of other values
    bt.testing.assert_same_structure(tmp_path / "run", same)
    assert same.hash == bt.load(tmp_path / "run").hash
    for other, said in (
        (bt.trace(model, -torch.ones(3)), "`x.sum() > 0`"),
        (bt.trace(model, torch.ones(4)), "shape (3,) -> (4,)"),
        (bt.trace(model, torch.ones(3), 3.0), "2.0"),
    ):
        with pytest.raises(AssertionError, match="the run has another structure than its") as info:
            bt.testing.assert_same_structure(tmp_path / "run", other)
        assert said in str(info.value)
    with pytest.raises(LoadError):
        bt.testing.assert_same_structure(tmp_path / "none", same)
