"""The page of a stepped run shows what the run has: positions, variables, answers, both sides."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.debug.stepping import SteppedRun
from bendtrace.debug.visit import safe_text_of
from bendtrace.errors import InputError
from bendtrace.show.viewer import viewer_frame
from tests.browser import Browser, browser, chromium
from tests.corpus import CASES
from tests.corpus._case import Case
from tests.promise import random_states, state
from tests.test_viewer import Elements

# A browser opens each page: the README's command leaves these out.
pytestmark = pytest.mark.more


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, deep: int) -> Tensor:
        y = self.linear(x)
        return y.relu() + deep


class Walk(nn.Module):
    """A loop, a branch, a call, a buffer and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        steps, seen = 0, []
        while x.norm() > 1:
            x = x / 2 + torch.rand(2) * 0.01
            steps += 1
            seen.append(x)
        if x.mean() > 0:
            return self.inner(x, steps)
        values, chosen = x.topk(1)
        return values * len(seen) + chosen


def walk(**options: Any) -> SteppedRun:
    torch.manual_seed(0)
    model = Walk()
    with torch.no_grad():
        return bt.BendedModule(model).step(torch.tensor([4.0, 1.0]), **options)


def shown(run: SteppedRun, **options: Any) -> dict[str, Any]:
    """Return the data of the page."""
    data: dict[str, Any] = Elements(run.to_html(flops=False, **options)).data
    return data


def frames_in(data: dict[str, Any], event: dict[str, Any]) -> list[Any]:
    """Return the frames at an event of the page, as tuples with texts."""
    told = data["stepped"]
    found = []
    for number in event["frames"]:
        frame = told["frames"][number]
        source = data["sources"][frame["source"]]
        variables = {name: told["texts"][text] for name, text in frame["variables"]}
        file = data["files"][source["file"]]["path"]
        found.append((source["function"], file, source["line"], variables))
    return found


def frames_of(run: SteppedRun) -> list[Any]:
    """Return the frames at the position of a run, with texts in place of values."""
    return [
        (
            frame.function,
            frame.file,
            frame.line,
            {n: safe_text_of(v) for n, v in frame.variables.items()},
        )
        for frame in run.frames
    ]


def assert_shows(run: SteppedRun, some: int = 1) -> dict[str, Any]:
    """Compare the page with what is seen by going to each position; return its data."""
    data = shown(run)
    events = data["stepped"]["events"]
    assert len(events) == len(run)
    for number in range(0, len(run), some):
        run.goto(number)
        assert frames_in(data, events[number]) == frames_of(run), number
        if "result" in events[number] and number not in run._edits:
            assert data["stepped"]["texts"][events[number]["result"]] == safe_text_of(
                run.value(number)
            )
        if events[number]["kind"] == "question":
            assert events[number]["answer"] == safe_text_of(run.value(number))
    return data


# What is in the page


def test_each_position_has_the_variables_that_goto_gives() -> None:
    run = walk()
    before = state(run._function), random_states()
    data = assert_shows(run)
    events = data["stepped"]["events"]
    assert [event["kind"] for event in events].count("question") == 5
    inside = next(event for event in events if event.get("name") == "relu")
    (inner, _, _, variables), (outer, *_) = frames_in(data, inside)
    assert (inner, outer) == ("Inner.forward", "Walk.forward")
    assert variables["self"] == "Inner(...)"
    assert variables["deep"] == "3"
    assert data["stepped"]["end"] == {"output": safe_text_of(run.output)}
    assert (state(run._function), random_states()) == before


def test_a_capture_that_shows_the_variables_of_another_position_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bendtrace.debug.visit import Looks

    take = Looks.take
    monkeypatch.setattr(Looks, "take", lambda looks, n, frames: take(looks, n + 1, frames))
    with pytest.raises(AssertionError):
        assert_shows(walk())


def test_events_are_those_of_the_log() -> None:
    run = walk()
    data = shown(run)
    entries = {entry["op"]: entry for entry in data["entries"] if entry["kind"] == "op"}
    for number, event in enumerate(data["stepped"]["events"]):
        source = data["sources"][event["source"]]
        assert (
            str(run.goto(number))
            .splitlines()[1 + min(number, 3)]
            .endswith(f"test_stepping_page.py:{source['line']}")
        )
        if event["kind"] == "op":
            name = re.sub(r"_\d+$", "", event["name"])
            is_assigning = name in ("add_", "sub_", "mul_")  # `x += y` is "iadd" in a log
            kind = f"i{name.strip('_')}" if is_assigning else name.strip("_")
            assert entries[event["op"]]["type"] == kind
        else:
            step = data["steps"][event["step"]]
            assert (step["text"], step["value"]) == (source["text"], event["answer"])


def test_every_question_of_a_loop_can_be_named_by_its_step() -> None:
    run = walk()
    asked = [step for step in run.trace.flow_steps if step.text == "x.norm() > 1" and step.guard]
    positions = [run.goto(step).position for step in asked]
    assert positions == sorted(set(positions))
    assert run.value(asked[-1]) is False
    run.answer(asked[0], False)
    assert not any(step.value for step in run.trace.flow_steps[2:] if step.kind == "while")


def test_the_position_is_that_of_the_run() -> None:
    run = walk().goto("norm_1")
    assert shown(run)["stepped"]["position"] == run.position
    assert shown(run.goto(-1))["stepped"]["position"] == len(run) - 1


def test_the_lines_for_changes_do_what_they_say() -> None:
    events = shown(walk())["stepped"]["events"]
    for number, event in enumerate(events):
        run = walk()
        exec(event["go"], {"run": run})
        assert run.position == number
        if "change" in event:
            exec(event["change"], {"run": run, "torch": torch})
            assert list(run._edits) == [number]
            if event["answer" if event["kind"] == "question" else "op"] in ("True", "False"):
                assert run.value(number) is (event["answer"] == "False")
    assert [event["name"] for event in events if "change" not in event] == []
    run.answer(run.trace.flow_steps[-1], False)  # the side with an op that has two results
    fixed = [event["name"] for event in shown(run)["stepped"]["events"] if "change" not in event]
    assert fixed == ["topk"]


def test_changes_and_the_answers_that_the_values_give_are_shown() -> None:
    run = walk()
    question = len(run) - 4
    own = run.value(question)
    run.set(0, torch.tensor(7.0)).answer(run.goto(run.trace.flow_steps[-1]).position, not own)
    data = assert_shows(run)
    changed = [event for event in data["stepped"]["events"] if "given" in event]
    assert [event["kind"] for event in changed] == ["op", "question"]
    assert changed[0]["given"] == "tensor () float32: 7"
    assert data["stepped"]["texts"][changed[0]["result"]] == "tensor () float32: 1"
    assert (changed[1]["given"], changed[1]["own"]) == (str(not own), str(own))


def test_both_sides_are_shown_where_both_were_run() -> None:
    run = walk()
    step = run.trace.flow_steps[-1]
    position = run.goto(step).position
    assert shown(run)["stepped"]["sides"] == []
    before = [
        (number, frames_of(run.goto(number)), safe_text_of(run.output))
        for number in range(position + 1, len(run))
    ]
    run.answer(step, not step.value)
    data = assert_shows(run)
    (side,) = data["stepped"]["sides"]
    assert (side["at"], side["answer"]) == (position, str(step.value))
    assert side["end"] == {"output": before[0][2]}
    found = [(n, frames_in(data, e)) for n, e in enumerate(side["events"], position + 1)]
    assert found == [(number, frames) for number, frames, _ in before]
    exec(side["events"][0]["go"], {"run": run})
    assert run.position == position + 1
    assert run.value(position) is step.value
    (other,) = shown(run)["stepped"]["sides"]
    assert other["answer"] == str(not step.value)


def test_a_change_before_a_question_forgets_its_other_side() -> None:
    run = walk()
    run.answer(run.trace.flow_steps[-1], not run.trace.flow_steps[-1].value)
    assert len(shown(run)["stepped"]["sides"]) == 1
    run.set(0, torch.tensor(7.0))
    assert shown(run)["stepped"]["sides"] == []


def test_other_sides_keep_their_own_later_changes() -> None:
    run = walk()
    step = run.trace.flow_steps[-1]
    position = run.goto(step).position
    run.set(position + 1, torch.zeros_like(run.value(position + 1)))
    output = safe_text_of(run.output)
    run.answer(position, not step.value)
    (side,) = shown(run)["stepped"]["sides"]
    assert side["end"] == {"output": output}
    assert "given" in side["events"][0]
    assert "go" in side["events"][0]
    assert not any("go" in event or "change" in event for event in side["events"][1:])


def test_a_run_that_raises_shows_its_error() -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        return y @ torch.ones(7)

    run = bt.BendedModule(model).step(torch.ones(2))
    (end,) = [shown(run)["stepped"]["end"]]
    assert end["error"].startswith("RuntimeError: ")


# The budget


@pytest.mark.parametrize("budget", [0, 50, 200, 400, 800, 1600])
@pytest.mark.parametrize("at", [0, 9, -1])
def test_a_budget_keeps_the_positions_nearest_to_the_present_one(budget: int, at: int) -> None:
    run = walk().goto(at)
    whole, data = shown(run), shown(run, budget=budget)
    kept = [n for n, event in enumerate(data["stepped"]["events"]) if "frames" in event]
    size = sum(map(len, data["stepped"]["texts"]))
    assert size <= budget
    assert data["stepped"]["budget"] == budget
    assert len(data["stepped"]["events"]) == len(run)
    if kept:
        assert kept == list(range(kept[0], kept[-1] + 1))
        assert kept[0] <= run.position <= kept[-1] + 1
    assert kept or budget < 400
    assert budget or not kept
    for number in kept:
        assert frames_in(data, data["stepped"]["events"][number]) == frames_in(
            whole, whole["stepped"]["events"][number]
        )


def test_a_page_within_its_budget_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = walk()
    first = run.to_html()
    monkeypatch.setattr(SteppedRun, "_to_show", lambda *_: pytest.fail("captured again"))
    assert run.goto(0).to_html() == first


@pytest.mark.parametrize("budget", [-1, 2.5, True, None])
def test_a_budget_that_is_no_number_is_refused(budget: Any) -> None:
    with pytest.raises(InputError, match="budget= has to be an int of at least 0"):
        walk().to_html(budget=budget)


# Texts


class Colour(Enum):
    RED = 1


class Pair(NamedTuple):
    first: int
    second: Tensor


class Loud:
    def __repr__(self) -> str:
        pytest.fail("the code of a class was run")

    __str__ = __repr__


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (1.5, "1.5"),
        ("a'b", '"a\'b"'),
        (1 << 5000, "an int of 5001 bits"),
        (torch.zeros(2, 0), "tensor (2, 0) float32"),
        (torch.empty(3, device="meta"), "tensor (3,) float32 meta"),
        (torch.tensor([1, 2]), "tensor (2,) int64: [1, 2]"),
        (torch.tensor([True]), "tensor (1,) bool: [True]"),
        (torch.tensor([float("nan")]).bfloat16(), "tensor (1,) bfloat16: [nan]"),
        (torch.full((5, 5), 3 + 4j), f"tensor (5, 5) complex64: {'3+4j, ' * 8}..."),
        (torch.eye(2).to_sparse(), "tensor (2, 2) float32 sparse_coo"),
        (nn.Parameter(torch.ones(1)), "tensor (1,) float32: [1]"),
        ((torch.ones(1),), "(tensor (1,) float32: [1],)"),
        (torch.ones(1).topk(1), "(tensor (1,) float32: [1], tensor (1,) int64: [0])"),
        (Pair(1, torch.ones(())), "Pair(first=1, second=tensor () float32: 1)"),
        (list(range(20)), "[0, 1, 2, 3, 4, 5, 6, 7, ... 12 more]"),
        ({"a": {1}}, "{'a': set({1})}"),
        (torch.Size([2, 3]), "torch.Size([2, 3])"),
        (torch.float16, "torch.float16"),
        (slice(1, None), "slice(1, None, None)"),
        (Colour.RED, "Colour.RED"),
        (nn.Linear(2, 2), "Linear(...)"),
        (nn.Linear, "class Linear"),
        (torch, "module torch"),
        (len, "function len"),
        (Loud(), "Loud object"),
        ([Loud()], "[Loud object]"),
    ],
)
def test_values_as_text(value: Any, text: str) -> None:
    assert safe_text_of(value) == text


def test_texts_are_short() -> None:
    nested: list[Any] = []
    nested.append(nested)
    assert safe_text_of(nested) == "[[[[list of 1]]]]"
    assert len(safe_text_of("x" * 10**6)) <= 400
    assert len(safe_text_of([["word" * 20] * 50] * 50)) <= 400


def test_looking_runs_no_code_of_the_models_objects() -> None:
    def model(x: Tensor) -> Tensor:
        loud = Loud()
        return x * 2 if loud else x

    assert "Loud object" in shown(bt.BendedModule(model).step(torch.ones(2)))["stepped"]["texts"]


# Where it is shown


def test_the_page_names_nothing_outside_itself() -> None:
    elements = Elements(walk().to_html())
    attributes = [name for _, found in elements.found for name in found]
    assert not {"src", "href", "action", "srcset", "data", "style"} & set(attributes)
    assert not [name for name in attributes if name.startswith("on")]
    assert [a.get("type") for tag, a in elements.found if tag == "script"] == [
        "application/json",
        None,
    ]


def test_hostile_variables_stay_data() -> None:
    hostile = "</script><script>hurt = 1</script><img src=x>&\u2028"

    def model(x: Tensor, text: str) -> Tensor:
        return x * 2

    page = bt.BendedModule(model).step(torch.ones(2), hostile).to_html()
    elements = Elements(page)
    assert "img" not in [tag for tag, _ in elements.found]
    assert repr(hostile) in elements.data["stepped"]["texts"]


def test_a_notebook_shows_the_page_and_prints_stay_text() -> None:
    run = walk().goto(3)
    bundle = run._repr_mimebundle_()
    assert bundle["text/plain"] == str(run)
    assert str(run).startswith(repr(run))
    (outer, _), (tag, attributes) = Elements(bundle["text/html"]).found
    assert (outer, tag, attributes["sandbox"]) == ("div", "iframe", "allow-scripts")
    assert Elements(attributes["srcdoc"] or "").data["stepped"]["position"] == 3
    assert "height:900px" in (viewer_frame(run, height=900) or "")


def test_a_notebook_gets_text_where_there_is_no_page() -> None:
    run = walk()
    run._function.calls += 1
    html = run._repr_mimebundle_()["text/html"]
    assert "iframe" not in html
    assert "calls has changed since the run was begun" in html
    run = walk()
    page = run.to_html(budget=3_000_000 // 10)
    run.finish()
    assert "iframe" in run._repr_mimebundle_()["text/html"], "it was captured before"
    assert Elements(page).data["stepped"]["events"]
    run = walk()
    run.finish()
    assert "this run is finished" in run._repr_mimebundle_()["text/html"]
    with pytest.raises(InputError, match="this run is finished"):
        run.to_html()


def test_looking_leaves_the_run_as_it_was() -> None:
    run = walk(budget=2**20)
    output, trace, kept = run.output, run.trace, run.nbytes
    run.goto(4).to_html()
    assert run.output is output
    assert run.trace is trace
    assert (run.position, run.nbytes) == (4, kept)


def test_a_submodule_called_step_is_reached_through_the_model() -> None:
    class Stepping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.step(x)

    model = Stepping()
    bended = bt.BendedModule(model)
    assert isinstance(bended.step(torch.ones(2)), SteppedRun)
    assert bended.model.step is bended.get_submodule("step") is model.step


# Models of the corpus whose variables have the addresses of objects in them.
ADDRESSES = {"modules_of_forward"}


@pytest.mark.all
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pages_of_the_corpus_show_what_goto_shows(case: Case) -> None:
    if case.name in ADDRESSES:
        pytest.skip("its variables have the addresses of objects in them")
    torch.manual_seed(0)
    model = case.make()
    args, kwargs = next(iter(case.paths.values()))()
    try:
        run = bt.BendedModule.step(bt.BendedModule(model), *args, **kwargs)
    except InputError as error:
        pytest.skip(f"it is refused: {error}")
    assert_shows(run, 1 + len(run) // 5)


# How it behaves

needs_chromium = pytest.mark.skipif(
    chromium() is None, reason="no Chromium is installed, in which the page could be opened"
)


@pytest.fixture(scope="module")
def driver() -> Iterator[Browser]:
    with browser() as started:
        yield started


class Page:
    """The page of a run, open in a browser."""

    def __init__(self, driver: Browser, run: SteppedRun, folder: Path, **options: Any) -> None:
        self.driver, self.file = driver, folder / "run.html"
        self.file.write_text(run.to_html(flops=False, **options), encoding="utf-8")
        driver.size(1200, 800)
        self.open()

    def open(self, fragment: str = "") -> None:
        self.driver.open(f"{self.file.as_uri()}{fragment}")

    def __call__(self, expression: str) -> Any:
        return self.driver.evaluate(expression)

    def follow(self, text: str) -> None:
        """Click on a link of the panel."""
        links = "[...document.querySelectorAll('#panel .link')]"
        self(f"{links}.find(link => link.textContent.startsWith({json.dumps(text)})).click()")

    @property
    def where(self) -> str:
        return str(self("document.getElementById('where').textContent"))

    @property
    def panel(self) -> str:
        return str(self("document.getElementById('panel').innerText"))

    @property
    def variables(self) -> dict[str, str]:
        """Of the innermost function."""
        found: dict[str, str] = self(
            "(list => list ? Object.fromEntries([...list.querySelectorAll('dt')].map(term =>"
            " [term.textContent, term.nextSibling.textContent])) : {})"
            "(document.querySelector('#panel .variables'))"
        )
        return found

    @property
    def commands(self) -> list[str]:
        found: list[str] = self(
            "[...document.querySelectorAll('#panel .command input')].map(field => field.value)"
        )
        return found


@needs_chromium
@pytest.mark.more
def test_the_page_steps_forward_and_back_with_the_variables(
    driver: Browser, tmp_path: Path
) -> None:
    run = walk().goto(0)
    page = Page(driver, run, tmp_path)
    for number in range(len(run)):
        assert page.where == f"at {number} of {len(run)}"
        assert page.variables == frames_of(run.goto(number))[0][3]
        assert page.commands[0] == f"run.goto({number})"
        driver.press("ArrowRight")
    assert "the end" in page.panel
    assert safe_text_of(run.output) in page.panel
    driver.press("ArrowLeft")
    assert page.where == f"at {len(run) - 1} of {len(run)}"
    assert driver.complaints() == []
    assert driver.requests() == [page("location.href").split("#")[0]]


@needs_chromium
def test_the_page_goes_to_ops_questions_lines_and_addresses(
    driver: Browser, tmp_path: Path
) -> None:
    run = walk()
    page = Page(driver, run, tmp_path)
    page.open("#position=7")
    assert page.where.startswith("at 7 of")
    driver.press("/")
    driver.type("norm_1")
    driver.press("Enter")
    assert page.where.startswith(f"at {run.goto('norm_1').position} of")
    page.follow(f"{run.position + 2} ")
    assert page.where.startswith(f"at {run.position + 2} of")
    question = run.goto(run.trace.flow_steps[-1]).position
    page.open(f"#position={question}")
    assert [line for line in page.commands if line.startswith("run.answer")]
    line = run.frames[0].line
    page("document.querySelector('#panel .source .count.link').click()")
    assert page.where != f"at {question} of {len(run)}"
    driver.press("/")
    driver.type(f"test_stepping_page.py:{line}")
    driver.press("Enter")
    assert f":{line}" in page("document.querySelector('#panel .next').textContent")
    assert driver.complaints() == []


@needs_chromium
def test_the_page_shows_both_sides_and_says_what_was_left_out(
    driver: Browser, tmp_path: Path
) -> None:
    run = walk()
    step = run.trace.flow_steps[-1]
    position, output = run.goto(step).position, safe_text_of(run.output)
    after = frames_of(run.goto(position + 1))[0][3]
    run.answer(step, not step.value).goto(position)
    page = Page(driver, run, tmp_path)
    assert "given by hand" in page.panel
    page.follow("answered")
    assert page.where.startswith(f"at {position + 1} of")
    assert page.variables == after
    assert f"was answered {step.value}" in page.panel
    assert page.commands[0] == f"run.answer({position}, {step.value}); run.goto({position + 1})"
    page.driver.press("ArrowLeft")
    assert page.where == f"at {position} of {len(run)}" or page.where.startswith(f"at {position} ")
    page("document.getElementById('last').click()")
    assert output in page.panel
    page = Page(driver, run.goto(len(run) - 1), tmp_path, budget=200)
    assert "given by hand" not in page.panel
    page.open("#position=0")
    assert "Left out: the variables of all positions take more than 200" in page.panel
    driver.press("Escape")
    assert "were left out: the budget is 200 characters" in page.panel
    assert driver.complaints() == []


@needs_chromium
def test_a_frame_that_gets_its_size_late_shows_the_position(
    driver: Browser, tmp_path: Path
) -> None:
    frame = viewer_frame(walk().goto(-3), height=500)
    assert frame is not None
    file = tmp_path / "notebook.html"
    file.write_text(f'<!DOCTYPE html><meta charset="utf-8"><div hidden>{frame}</div>')
    driver.size(1200, 800)
    driver.open(file.as_uri())
    for _ in range(500):  # the frame loads on its own, after the page around it
        if driver.evaluate("document.querySelector('#panel h2') !== null", frame=True):
            break
        driver.evaluate("new Promise(done => setTimeout(done, 10))")
    stage = "document.getElementById('graph').getBoundingClientRect()"
    assert driver.evaluate(f"{stage}.width", frame=True) == 0
    driver.evaluate("document.querySelector('div').hidden = false")
    driver.evaluate(
        "new Promise(done => new ResizeObserver((_, observer) => {"
        f" if ({stage}.width) {{ observer.disconnect(); setTimeout(done, 50); }}"
        " }).observe(document.getElementById('graph')))",
        frame=True,
    )
    box = "document.querySelector('[aria-selected=true][data-id] .shape').getBoundingClientRect()"
    assert driver.evaluate(
        f"(([box, stage]) => box.left >= stage.left && box.right <= stage.right"
        f" && box.top >= stage.top && box.bottom <= stage.bottom)([{box}, {stage}])",
        frame=True,
    )
    assert driver.complaints() == []


@needs_chromium
def test_numbers_of_lines_are_aligned_and_can_be_read(driver: Browser, tmp_path: Path) -> None:
    page = Page(driver, walk().goto(3), tmp_path)
    numbers = "[...document.querySelectorAll('.source .count')]"
    assert page(f"{numbers}.some(each => each.matches('.link'))")
    assert page(f"{numbers}.some(each => !each.matches('.link'))")
    ends = page(
        f"{numbers}.map(each => {{ const range = document.createRange();"
        " range.selectNodeContents(each); return Math.round(range.getBoundingClientRect().right);"
        " })"
    )
    assert len(set(ends)) == 1
    for dark in (False, True):
        driver.size(1200, 800, dark=dark)
        assert driver.faint_texts() == []


@needs_chromium
def test_the_page_goes_on_from_a_module(driver: Browser, tmp_path: Path) -> None:
    run = walk()
    page = Page(driver, run.goto(0), tmp_path)
    linear = run.goto("inner.linear").position
    for key, position in (("ArrowRight", linear), ("ArrowLeft", linear - 1)):
        page.open("#path=inner")
        assert page.where == f"at {linear} of {len(run)}"
        driver.press(key)
        assert page.where == f"at {position} of {len(run)}"
