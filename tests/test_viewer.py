"""The HTML viewer: what is in the file, and how it behaves in a browser."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.show.viewer import activation_data, viewer_data, viewer_frame, viewer_html
from tests.browser import Browser, browser, chromium

# A browser opens each page: the README's command leaves these out.
pytestmark = pytest.mark.more

HOSTILE = '</script><script>hurt = 1</script><img src=x onerror="hurt = 2">&\u2028\'"`${1}'


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + x


class Walk(nn.Module):
    """A loop over a tensor around a cell, and a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()
        self.head = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(4)
        for step in x:
            state = self.cell(step + state)
        if state.sum() > 0:
            state = -state
        return self.head(state)


class Block(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x * 2


class Stack(nn.Module):
    """Blocks in a row, each added to what came before."""

    def __init__(self, blocks: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(depth) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def walk(save: str | None = "all") -> bt.Trace:
    torch.manual_seed(0)
    return bt.trace(Walk(), torch.rand(5, 4), save=save)


# What is in the file


class Elements(html.parser.HTMLParser):
    """The elements of a page, with their attributes and, for scripts and styles, their content."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.content: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self._open = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open = tag
        if tag in self.content:
            self.content[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open in self.content:
            self.content[self._open][-1] += data

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.content["script"][0])
        return found


def test_the_file_names_nothing_outside_itself() -> None:
    elements = Elements(viewer_html(walk()))
    attributes = [name for _, found in elements.found for name in found]
    assert not {"src", "href", "action", "srcset", "data", "style"} & set(attributes)
    assert not [name for name in attributes if name.startswith("on")]
    style, (_, script) = elements.content["style"][0], elements.content["script"]
    assert not re.search(r"url\(|@import", style)
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|import)\b\s*\(", script)
    assert "innerHTML" not in script
    assert "eval(" not in script


def test_its_policy_allows_the_one_script_and_the_one_style_and_nothing_else() -> None:
    elements = Elements(viewer_html(walk()))
    policies = [a["content"] for _, a in elements.found if a.get("http-equiv")]

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    style, script = elements.content["style"][0], elements.content["script"][1]
    assert policies == [
        f"default-src 'none'; script-src 'sha256-{digest(script)}'; "
        f"style-src 'sha256-{digest(style)}'; base-uri 'none'; form-action 'none'"
    ]


def hostile() -> bt.Trace:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(HOSTILE, Cell())

        def forward(self, x: Tensor) -> Tensor:
            x = self._modules[HOSTILE](x)  # </script><script>hurt = 3</script>
            return x * 2 if x.sum() > -1e9 and "</script>" else x

    Model.__name__ = Model.__qualname__ = f"Model{HOSTILE}"
    return bt.trace(Model(), torch.ones(4))


def test_hostile_names_and_source_stay_data() -> None:
    page = viewer_html(hostile())
    elements = Elements(page)
    assert [a.get("type") for tag, a in elements.found if tag == "script"] == [
        "application/json",
        None,
    ]
    assert "img" not in [tag for tag, _ in elements.found]
    assert HOSTILE in elements.data["name"]
    assert HOSTILE in {call["name"] for call in elements.data["modules"]}
    statements = [source.get("statement", "") for source in elements.data["sources"]]
    assert any("hurt = 3" in statement for statement in statements)
    assert "\u2028" not in page.split('id="data">')[1].split("</script>")[0]


def test_what_is_named_by_position_is_what_the_log_names_by_label() -> None:
    trace = walk()
    data = json.loads(json.dumps(viewer_data(trace), allow_nan=False))
    labels = [entry["label"] for entry in data["entries"]]
    assert labels == [entry.label for entry in trace.entries]
    calls = [call["label"] for call in data["modules"]]
    assert calls == [call.label for call in trace.modules]
    for entry, told in zip(trace.entries, data["entries"], strict=True):
        assert [labels[index] for index in told.get("parents", [])] == entry.parents
        assert (calls[told["call"]] if "call" in told else None) == (
            entry.scopes[-1] if entry.scopes else None
        )
        assert told.get("flow", []) == list(entry.flow)
        if entry.source is not None:
            source = data["sources"][told["source"]]
            assert (data["files"][source["file"]]["path"], source["line"]) == entry.source[:2]
    steps = [(step["kind"], step.get("text"), step.get("value")) for step in data["steps"]]
    assert steps == [(s.kind, s.text, repr(s.value)) for s in trace.flow_steps]


def test_a_run_that_was_saved_and_loaded_is_shown_as_before(tmp_path: Path) -> None:
    trace = walk()
    page = viewer_html(trace)
    trace.save(tmp_path / "run")
    assert viewer_html(bt.load(tmp_path / "run")) == page


def test_each_line_of_source_is_in_the_file_once() -> None:
    data = viewer_data(walk())
    (lines,) = [file["lines"] for file in data["files"] if file["path"] == __file__]
    (number,) = [n for n, line in lines.items() if line.strip() == "for step in x:"]
    assert lines[number + 1].strip() == "state = self.cell(step + state)"
    assert lines[number - 1].strip() == "state = x.new_zeros(4)"
    assert sum("torch.tanh(self.linear(x))" in line for line in lines.values()) == 1


def test_source_that_has_changed_since_the_run_is_not_shown(tmp_path: Path) -> None:
    import linecache

    file = tmp_path / "changing.py"
    file.write_text("def double(x):\n    return x * 2\n")
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    trace = bt.trace(names["double"], torch.ones(2))
    assert viewer_data(trace)["files"] == [
        {"path": str(file), "lines": {1: "def double(x):", 2: "    return x * 2"}}
    ]
    file.write_text("import os\nprint(os)\n")
    linecache.checkcache(str(file))
    data = viewer_data(trace)
    assert data["files"] == [{"path": str(file), "lines": {}}]
    assert [source["statement"] for source in data["sources"]] == ["return x * 2"]


@pytest.mark.parametrize(
    ("contents", "told"),
    [
        (
            torch.tensor([1.0, 2.0, 3.0, float("nan"), float("inf"), 0.0]),
            {"min": "0", "max": "3", "mean": "1.5", "nan": 1, "inf": 1, "zeros": 1},
        ),
        (
            torch.tensor([True, False, True]),
            {"mean": "0.66667", "first": ["True", "False", "True"]},
        ),
        (torch.tensor([2, 4]), {"min": "2", "max": "4", "first": ["2", "4"], "std": "1"}),
        (torch.tensor([3 + 4j]), {"max": "5", "first": ["3+4j"]}),
        (torch.tensor([5.0]).bfloat16(), {"dtype": "bfloat16", "mean": "5"}),
        (torch.tensor([float("nan")]), {"nan": 1, "first": ["nan"]}),
        (torch.empty(0, 3), {"shape": (0, 3), "dtype": "float32"}),
        (torch.empty(2, device="meta"), {"shape": (2,)}),
        (torch.eye(2).to_sparse(), {"shape": (2, 2)}),
        ({"mean": 1.5}, {"type": "dict", "text": "{'mean': 1.5}"}),
    ],
    ids=str,
)
def test_a_saved_value_is_told_in_a_few_numbers(contents: Any, told: dict[str, Any]) -> None:
    found = activation_data(contents)
    assert found is not None
    assert found | told == found
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bins_are_those_of_histc(dtype: torch.dtype, scale: float) -> None:
    for size in (2, 3, 100, 5000):
        values = torch.randn(size, dtype=dtype) * scale + 2
        for some in (values, (values / scale).round()):
            told = activation_data(some)
            assert told is not None
            if some.min() < some.max():
                assert told["bins"] == some.histc(24).tolist()


def test_nothing_is_told_of_what_was_not_saved() -> None:
    assert activation_data(None) is None
    assert not [entry for entry in viewer_data(walk(save=None))["entries"] if "saved" in entry]


def test_a_frame_holds_the_page_or_is_left_out_where_it_would_be_too_large() -> None:
    trace = walk()
    frame = viewer_frame(trace, height=320)
    assert frame is not None
    (outer, _), (tag, attributes) = Elements(frame).found
    assert outer == "div", "IPython warns of what begins with a frame"
    assert (tag, attributes["sandbox"]) == ("iframe", "allow-scripts")
    assert attributes["srcdoc"] == viewer_html(trace, flops=False)
    assert "height:320px" in (attributes["style"] or "")
    assert viewer_frame(trace, most=len(frame) // 2) is None


# How it behaves


class Page:
    """The viewer, open in a browser."""

    def __init__(self, driver: Browser, folder: Path) -> None:
        self.driver = driver
        self._folder = folder

    def open(self, history: Any, fragment: str = "", flops: bool = False) -> None:
        file = self._folder / "run.html"
        file.write_text(viewer_html(history, flops=flops), encoding="utf-8")
        self.driver.size(1200, 800)
        self.driver.open(f"{file.as_uri()}{fragment}")

    def __call__(self, expression: str) -> Any:
        return self.driver.evaluate(expression)

    def names(self, kind: str = "") -> list[str]:
        """Names of the nodes and frames that are shown."""
        wanted = f'[data-kind="{kind}"]' if kind else "[data-kind]"
        shown = f"[...document.querySelectorAll('#world {wanted}')]"
        found: list[str] = self(f"{shown}.map(node => node.dataset.name)")
        return sorted(found)

    def captions(self) -> list[str]:
        found: list[str] = self(
            "[...document.querySelectorAll('#world .node, #world .frame')]"
            ".map(node => [...node.querySelectorAll('text')].map(t => t.textContent).join(' '))"
        )
        return found

    def _element(self, name: str, part: str = "") -> str:
        return f"document.querySelector('[data-name={json.dumps(name)}] {part or '.shape'}')"

    def click(self, name: str, part: str = "", times: int = 1) -> None:
        """Click on a node or frame, near its upper edge, or on a part of it."""
        box = f"{self._element(name, part)}.getBoundingClientRect()"
        x, y = self(
            f"(box => [box.x + box.width / 2, box.y + Math.min(box.height / 2, 14)])({box})"
        )
        self.driver.click(x, y, times=times)

    def toggle(self, name: str) -> None:
        self.click(name, ".sign circle")

    def push(self, label: str) -> None:
        box = f"document.getElementById({json.dumps(label)}).getBoundingClientRect()"
        x, y = self(f"(box => [box.x + box.width / 2, box.y + box.height / 2])({box})")
        self.driver.click(x, y)

    def follow_address(self, fragment: str) -> None:
        """Change the fragment of the address."""
        self(
            "new Promise(done => { addEventListener('hashchange', () => setTimeout(done, 0),"
            f" {{ once: true }}); location.hash = {json.dumps(fragment)}; }})"
        )

    def follow(self, name: str) -> None:
        """Click on a link of the panel."""
        links = "[...document.querySelectorAll('#panel .link')]"
        self(f"{links}.find(link => link.textContent === {json.dumps(name)}).click()")

    @property
    def panel(self) -> str:
        text: str = self("document.getElementById('panel').innerText")
        return text

    @property
    def title(self) -> str:
        """Of what the panel is about."""
        text: str = self("document.querySelector('#panel h2').textContent")
        return text

    @property
    def selected(self) -> list[str]:
        found: list[str] = self(
            "[...document.querySelectorAll('[aria-selected=true][data-id]')]"
            ".map(node => node.dataset.name)"
        )
        return found

    def is_seen(self, name: str) -> bool:
        seen: bool = self(
            f"(([box, stage]) => box.left >= stage.left && box.right <= stage.right"
            f" && box.top >= stage.top && box.top < stage.bottom)"
            f"([{self._element(name)}, document.getElementById('graph')]"
            f".map(each => each.getBoundingClientRect()))"
        )
        return seen

    @property
    def scale(self) -> float:
        return float(
            self("document.getElementById('world').transform.baseVal.consolidate().matrix.a")
        )


needs_chromium = pytest.mark.skipif(
    chromium() is None, reason="no Chromium is installed, in which the viewer could be opened"
)


@pytest.fixture(scope="module")
def driver() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture
def page(driver: Browser, tmp_path: Path) -> Iterator[Page]:
    opened = Page(driver, tmp_path)
    yield opened
    assert driver.complaints() == []
    outside = [
        url for url in driver.requests() if not url.startswith("file://") and url != "about:blank"
    ]
    assert outside == []


@needs_chromium
def test_it_opens_with_modules_values_and_decisions(page: Page) -> None:
    page.open(walk())
    assert page.title == "Walk"
    assert page.names("step") == ["state.sum() > 0", "x"]
    assert "cell:1" in page.names("module")
    assert page.names("input") == ["input_1_0"]
    captions = page.captions()
    assert any(caption.startswith("cell") and "\u00d75" in caption for caption in captions)
    assert "x for → 5 iterations" in captions
    assert any(re.fullmatch(r"state.sum\(\) > 0 if → (True|False)", c) for c in captions)
    assert page.driver.requests() == [page("location.href")]


@needs_chromium
def test_a_click_shows_the_entry_and_its_source(page: Page) -> None:
    trace = walk()
    page.open(trace)
    label = next(e.label for e in trace.entries if e.layer_type == "tanh")
    page.click(label)
    entry = trace[label]
    assert page.title == label
    assert page.selected == [label]
    told = page.panel
    for piece in (
        entry.node_path,
        "float32",
        "cpu",
        "16 B",
        entry.parents[0],
        entry.children[0],
        entry.grad_fn,
        "return torch.tanh(self.linear(x)) + x",
        "test_viewer.py:",
        "for x",
        "cell:1",
    ):
        assert piece in told, piece
    assert (
        page("document.querySelector('#panel .here mark').textContent")
        == "torch.tanh(self.linear(x))"
    )
    statistics = activation_data(entry.tensor_contents)
    assert statistics is not None
    assert f"{statistics['min']} to {statistics['max']}" in told
    assert page("document.querySelectorAll('#panel .histogram rect').length") == 24


@needs_chromium
def test_gradients_are_told_as_well(page: Page) -> None:
    x = torch.ones(2, requires_grad=True)
    trace = bt.trace(lambda x: (x * 3).sum(), x, save="all", save_gradients=True)
    trace.output.backward()
    page.open(trace, "#path=mul_1")
    assert re.search(r"GRADIENT\s+saved as\s+float32 2\s+range\s+1 to 1\s", page.panel)


@needs_chromium
def test_links_of_the_panel_lead_along_the_values(page: Page) -> None:
    trace = walk()
    page.open(trace)
    label = next(e.label for e in trace.entries if e.layer_type == "tanh")
    page.click(label)
    parent = trace[label].parents[0]
    page.follow(parent)
    assert page.title == parent
    assert page.selected == [parent]


@needs_chromium
def test_passes_of_one_box_are_gone_through_in_the_panel(page: Page) -> None:
    trace = walk()
    page.open(trace)
    page.click(next(e.label for e in trace.entries if e.layer_type == "tanh"))
    first = page.title
    page("document.querySelector('#panel .passes button:last-of-type').click()")
    assert (first[-2:], page.title) == (":1", f"{first[:-2]}:2")
    assert page.selected == [first]


@needs_chromium
def test_modules_open_and_close(page: Page) -> None:
    page.open(walk())
    inside = page.names()
    page.toggle("cell:1")
    outside = page.names()
    assert "cell:1" in outside
    assert set(outside) < set(inside)
    page.click("cell:1")
    assert (page.title, page.names()) == ("cell:1", outside)
    page.driver.press("Enter")
    assert page.names() == inside
    page.click("cell:1", ".title", times=2)
    assert page.names() == outside


@needs_chromium
def test_search_finds_by_path_and_function_and_source_and_opens_what_is_closed(page: Page) -> None:
    trace = bt.trace(Stack(9, 6), torch.ones(2, 4))
    page.open(trace)
    assert "blocks.3.layers.4:1" not in page.panel
    page.driver.press("/")
    page.driver.type("blocks.3.layers.4")
    assert page("document.activeElement.id") == "query"
    found = page("[...document.querySelectorAll('#results [role=option]')].map(o => o.textContent)")
    assert found[0].startswith("blocks.3.layers.4:1")
    page.driver.press("ArrowDown")
    page.driver.press("Enter")
    (chosen,) = page.selected
    assert trace[chosen].module == "blocks.3.layers.4"
    assert page.is_seen(chosen)
    assert "blocks.3:1" in page.names("module")
    page("document.getElementById('query').value = ''")
    for words, kind in (("relu_1", "op"), ("x + block(x)", "op"), ("BLOCKS.8 layers.2", "Linear")):
        page("document.getElementById('query').select()")
        page.driver.type(words)
        found = page(
            "[...document.querySelectorAll('#results [role=option]')].map(o => o.textContent)"
        )
        assert any(kind in each for each in found), (words, found)
    page("document.getElementById('query').select()")
    page.driver.type("no such thing")
    assert page("document.getElementById('results').innerText").strip() == "Nothing found."


@needs_chromium
def test_stepping_goes_through_values_and_decisions_in_order(page: Page) -> None:
    trace = walk()
    page.open(trace)
    page("document.getElementById('rolled').click()")
    stops = []
    total = int(page("document.getElementById('position').max")) + 1
    for _ in range(total):
        page.driver.press("ArrowRight")
        stops.append(page.title)
        assert page.is_seen(page.selected[0])
    shown = {e.index for e in trace.entries if e.kind in ("input", "op")}
    expected = []
    for entry in trace.entries:
        if entry.kind == "output" or entry.index in shown:
            expected.append(entry.label)
            shown.discard(entry.index)  # an op with several results is one stop
    decisions = [s.text for s in trace.flow_steps if s.kind != "shape"]
    assert [stop for stop in stops if stop not in decisions] == expected
    assert [stop for stop in stops if stop in decisions] == decisions
    loop = stops.index("x")
    assert loop < stops.index(next(e.label for e in trace.entries if e.layer_type == "tanh"))
    assert page("document.getElementById('where').textContent") == f"{total} of {total}"
    page.driver.press("ArrowLeft")
    assert page.title == stops[-2]
    page.push("first")
    assert page.title == stops[0]
    assert page("document.querySelectorAll('#nodes .node:not(.later)').length") == 1


@needs_chromium
def test_stepping_goes_on_from_a_module(page: Page) -> None:
    trace = walk()
    page.open(trace)
    page("document.getElementById('rolled').click()")
    linear = trace["head.0:1"].label
    before = next(e.label for e in trace.entries if e.layer_type == "neg")
    for key, title in (("ArrowRight", linear), ("ArrowLeft", before)):
        page.follow_address("#path=head")
        assert page.title == "head:1"
        page.driver.press(key)
        assert page.title == title

    # So does a module that begins with a decision, and one without ops of its own.
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp() if x.sum() > 0 else x

    model = nn.Sequential(nn.Tanh(), nn.Identity(), Asks())
    trace = bt.trace(model, torch.ones(2))
    page.open(trace, "#path=1")
    page.driver.press("ArrowRight")
    assert page.title == trace["sum_1"].label
    page.open(trace, "#path=2")
    page.driver.press("ArrowRight")
    assert page.title == trace["sum_1"].label


@needs_chromium
def test_boxes_that_are_drawn_again_keep_the_focus(page: Page) -> None:
    page.open(walk())
    focused = "document.activeElement.dataset.name"
    page.click("head:1")
    assert page(focused) == "head:1"
    page.driver.press("Enter")
    assert page(focused) == "head:1"
    page.driver.press("n")
    assert page(focused) == "head:1"
    page("document.querySelector('[data-name=\"cell:1\"]').focus()")
    page.driver.press("ArrowRight")
    assert page(focused) == "cell:1"
    # Unrolled there is another box of the name, or else the one that tab leads to.
    page.driver.press("r")
    assert page("document.activeElement.closest('#graph') !== null")


@needs_chromium
def test_controls_of_the_panel_keep_the_focus(page: Page) -> None:
    page.open(walk(), "#path=tanh_1")
    page("document.querySelector('[aria-label=\"Next pass\"]').focus()")
    for number in (2, 3):
        page.driver.press("Enter")
        assert page.title == f"tanh_1_6:{number}" or page.title.endswith(f":{number}")
    page("document.querySelector('#panel .links .link').focus()")
    page.driver.press("Enter")
    assert page("document.activeElement.id") == "panel"


@needs_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_texts_can_be_read(page: Page, dark: bool) -> None:
    trace = walk()
    for fragment in ("", "#path=cell", "#path=tanh_1&view=unrolled"):
        page.open(trace, fragment, flops=True)
        page.driver.size(1200, 800, dark=dark)
        page("document.getElementById('numbers').click()")
        assert page.driver.faint_texts() == []
    for colour in ("time", "bytes", "flops"):
        page(
            f"(list => {{ list.value = '{colour}'; list.dispatchEvent(new Event('change')); }})"
            "(document.getElementById('colour'))"
        )
        assert page.driver.faint_texts() == []
    page.driver.press("/")
    page.driver.type("linear")
    page.driver.press("ArrowDown")
    assert page.driver.faint_texts() == []


@needs_chromium
def test_what_stepping_opens_closes_again_behind_it(page: Page) -> None:
    page.open(bt.trace(Stack(9, 6), torch.ones(2, 4)))
    before = page.names()
    shown = set()
    for _ in range(12):
        page.driver.press("ArrowRight")
        shown |= set(page.names()) - set(before)
    assert any(name.startswith("relu") for name in shown)
    page.driver.press("Escape")
    assert page.names() == before
    assert page.title == "Stack"


@needs_chromium
@pytest.mark.parametrize(
    ("key", "title"),
    [
        ("tanh_1", "tanh"),
        ("cell.tanh", "tanh"),
        ("cell:3", "cell:3"),
        ("cell", "cell:1"),
        ("head.0", "head.0:1"),
        ("0", "input_1_0"),
        ("-1", "output_1"),
    ],
)
def test_an_address_opens_it_at_a_node(page: Page, key: str, title: str) -> None:
    page.open(walk(), f"#path={key}")
    assert page.title.startswith(title)
    assert len(page.selected) == 1
    assert page.is_seen(page.selected[0])


@needs_chromium
def test_the_address_names_what_is_selected(page: Page) -> None:
    page.open(walk())
    page.click("input_1_0")
    assert page("location.hash") == "#path=input_1_0"
    page("location.hash = '#path=cell'")
    page("new Promise(done => setTimeout(done, 20))")
    assert page.title == "cell:1"
    page("location.hash = '#path=nothing'")
    page("new Promise(done => setTimeout(done, 20))")
    assert (
        page("document.getElementById('note').textContent") == 'There is no "nothing" in this run.'
    )


@needs_chromium
def test_unrolled_each_pass_is_its_own(page: Page) -> None:
    page.open(walk())
    assert [name for name in page.names("module") if name.startswith("cell")] == ["cell:1"]
    page.driver.press("r")
    cells = [name for name in page.names("module") if name.startswith("cell")]
    assert cells == [f"cell:{number}" for number in range(1, 6)]
    assert page("document.querySelectorAll('#wires .back').length") == 0
    page.push("rolled")
    assert [name for name in page.names("module") if name.startswith("cell")] == ["cell:1"]
    assert page("document.querySelectorAll('#wires .back').length") > 0


@needs_chromium
def test_a_place_between_different_modules_is_no_loop_when_rolled(page: Page) -> None:
    page.open(bt.trace(Stack(3, 2), torch.ones(2, 4)))
    page("document.getElementById('collapse').click()")
    assert page.names("module") == ["blocks.0:1", "blocks.1:1", "blocks.2:1"]
    assert [name[-2:] for name in page.names("op")] == [":1", ":2", ":3"]
    assert page("document.querySelectorAll('#wires .back').length") == 0


@needs_chromium
def test_numbers_are_shown_on_request_and_when_they_are_selected(page: Page) -> None:
    trace = walk()
    (number,) = {e.label for e in trace.entries if e.layer_type.startswith("bool")}
    page.open(trace)
    assert page.names("number") == []
    page.driver.press("n")
    assert number in page.names("number")
    page.driver.press("n")
    assert page.names("number") == []
    page.click("state.sum() > 0")
    page.follow(number)
    assert page.selected == [number]


@needs_chromium
def test_colours_by_time_and_size_weigh_what_a_closed_module_holds(page: Page) -> None:
    page.open(walk())
    page.toggle("cell:1")
    fill = "getComputedStyle(document.querySelector('[data-name=\"cell:1\"] .shape')).fill"
    plain = page(fill)
    page(
        "(list => { list.value = 'bytes'; list.dispatchEvent(new Event('change')); })"
        "(document.getElementById('colour'))"
    )
    assert page(fill) != plain
    assert page("document.querySelectorAll('#nodes .node:not(.shaded)').length") == 0


@needs_chromium
def test_it_pans_and_zooms(page: Page) -> None:
    page.open(walk())
    box = "document.querySelector('#nodes .node').getBoundingClientRect()"
    place = f"(box => [Math.round(box.x), Math.round(box.y)])({box})"
    before, scale = page(place), page.scale
    page.driver.mouse("mousePressed", 30, 300, button="left", clickCount=1)
    page.driver.mouse("mouseMoved", 70, 330, button="left", buttons=1)
    page.driver.mouse("mouseReleased", 70, 330, button="left", clickCount=1)
    assert page(place) == [before[0] + 40, before[1] + 30]
    page.driver.mouse("mouseWheel", 400, 300, deltaX=0, deltaY=-240)
    assert page.scale > scale
    page.driver.press("0")
    fitted = page.scale
    page.driver.press("+")
    assert page.scale == pytest.approx(fitted * 1.25, rel=1e-3)
    at = page(place)
    page.driver.press("ArrowDown", shift=True)
    assert page(place) == [at[0], at[1] - 80]


@needs_chromium
def test_arrows_follow_the_values(page: Page) -> None:
    trace = walk()
    page.open(trace, "#path=tanh_1")
    page.driver.press("ArrowUp")
    assert page.title == trace["tanh_1:1"].parents[0]
    page.driver.press("ArrowDown")
    assert page.title == trace["tanh_1:1"].label


@needs_chromium
def test_nodes_tell_a_screen_reader_what_they_are(page: Page) -> None:
    page.open(walk(), "#path=cell")
    frame = page(
        "(node => [...node.attributes].filter(a => /^(role|aria|tabindex)/.test(a.name))"
        ".map(a => [a.name, a.value]))"
        "(document.querySelector('[data-name=\"cell:1\"]'))"
    )
    assert dict(frame) == {
        "role": "treeitem",
        "tabindex": "0",
        "aria-level": "1",
        "aria-selected": "true",
        "aria-label": "module, cell, \u00d75, Cell \u00b7 3 nodes",
        "aria-expanded": "true",
    }
    assert page("document.querySelectorAll('#world [tabindex=\"0\"]').length") == 1
    unnamed = page(
        "[...document.querySelectorAll('button, input, select')].filter(e => !e.textContent.trim()"
        " && !e.getAttribute('aria-label')).map(e => e.outerHTML)"
    )
    assert unnamed == []


@needs_chromium
def test_hostile_names_are_shown_as_they_are_and_do_nothing(page: Page) -> None:
    trace = hostile()
    page.open(trace)
    assert page("typeof hurt") == "undefined"
    assert page("document.querySelectorAll('script').length") == 2
    assert HOSTILE in page.title
    page.driver.press("/")
    page.driver.type("onerror")
    page.driver.press("Enter")
    assert HOSTILE in page.title
    assert "hurt = 3" in page.panel
    assert page("document.querySelectorAll('img').length + document.images.length") == 0
    page.driver.press("ArrowRight")
    assert page("typeof hurt") == "undefined"


@needs_chromium
def test_it_fits_a_telephone(page: Page) -> None:
    page.open(walk())
    page.driver.size(360, 640, touch=True)
    page.driver.open(page("location.href"))
    assert page("document.documentElement.scrollWidth") == 360
    page.click("input_1_0")
    assert page.title == "input_1_0"
    assert page("document.getElementById('graph').getBoundingClientRect().height") > 150


@needs_chromium
def test_two_fingers_zoom(page: Page) -> None:
    page.open(walk())
    page.driver.size(360, 640, touch=True)
    page.driver.open(page("location.href"))
    before = page.scale
    for kind, apart in (("touchStart", 20), ("touchMove", 30), ("touchMove", 60), ("touchEnd", 0)):
        fingers = [{"x": 180 + side * apart, "y": 200, "id": side} for side in (-1, 1) if apart]
        page.driver.send("Input.dispatchTouchEvent", type=kind, touchPoints=fingers)
    assert page.scale > 1.5 * before


@needs_chromium
def test_it_is_dark_where_the_reader_prefers_that(page: Page) -> None:
    page.open(walk())
    colours = (
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    light = page(colours)
    page.driver.size(1200, 800, dark=True)
    dark = page(colours)

    def brightness(colour: str) -> int:
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    assert brightness(light[0]) > 600 > 150 > brightness(dark[0])
    assert brightness(light[1]) < 150 < 600 < brightness(dark[1])


@needs_chromium
def test_it_works_in_a_frame_that_may_do_nothing_but_run_its_script(
    page: Page, tmp_path: Path
) -> None:
    frame = viewer_frame(walk(), height=500)
    assert frame is not None
    file = tmp_path / "notebook.html"
    file.write_text(f'<!DOCTYPE html><meta charset="utf-8">{frame}', encoding="utf-8")
    page.driver.size(1200, 800)
    page.driver.open(file.as_uri())
    title = "document.querySelector('#panel h2').textContent"
    for _ in range(500):  # the frame loads on its own, after the page around it
        if page.driver.evaluate("document.querySelector('#panel h2') !== null", frame=True):
            break
        page.driver.evaluate("new Promise(done => setTimeout(done, 10))")
    assert page.driver.evaluate(title, frame=True) == "Walk"
    click = "dispatchEvent(new MouseEvent('click', { bubbles: true }))"
    node = "document.querySelector('[data-name=input_1_0] .shape')"
    page.driver.evaluate(f"{node}.{click}", frame=True)
    assert page.driver.evaluate(title, frame=True) == "input_1_0"


@needs_chromium
def test_many_outputs_stand_in_one_box(page: Page) -> None:
    page.open(bt.trace(lambda x: [x + number for number in range(12)], torch.ones(2)))
    assert page.names("output") == []
    (group,) = page.names("group")
    assert group == "output_1_2 \u2026 output_12_13"
    page.toggle(group)
    assert len(page.names("output")) == 12


@needs_chromium
def test_a_stretch_of_many_ops_opens_in_groups_and_its_parts_open(page: Page) -> None:
    def chain(x: Tensor) -> Tensor:
        for name in ("sin", "cos", "tanh") * 30:
            x = getattr(torch, name)(x)
        return x

    page.open(bt.trace(chain, torch.ones(2)))
    page.driver.press("r")
    groups = page.names("group")
    assert 2 <= len(groups) <= 40
    ops = set(page.names("op"))
    for group in groups:
        page.toggle(group)
        ops |= set(page.names("op"))
        page.toggle(group)
    assert len(ops) == 90


@needs_chromium
def test_nothing_overlaps(page: Page) -> None:
    """Nodes among themselves; an open module lies around what it holds."""
    for history in (walk(), bt.trace(Stack(4, 3), torch.ones(2, 4))):
        page.open(history)
        for key in "ern":
            page.driver.press(key)
            overlaps = page(
                """(() => {
                const boxes = [...document.querySelectorAll('#nodes .node .shape')]
                  .map(shape => shape.getBoundingClientRect());
                const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
                  && a.top < b.bottom - 1 && b.top < a.bottom - 1;
                return boxes.filter((a, i) => boxes.some((b, j) => j < i && meet(a, b))).length;
                })()"""
            )
            assert overlaps == 0
        frames = page(
            "[...document.querySelectorAll('.frame')].map(f => [f.dataset.id, (b => [b.left, b.top,"
            " b.right, b.bottom])(f.querySelector('.shape').getBoundingClientRect())])"
        )
        nodes = page(
            "[...document.querySelectorAll('#nodes .node')].map(f => [f.dataset.id, (b => [b.left,"
            " b.top, b.right, b.bottom])(f.querySelector('.shape').getBoundingClientRect())])"
        )
        held = 0
        for name, (left, top, right, bottom) in frames:
            for inner, box in nodes:
                if re.match(re.escape(name) + r"[/#?]", inner):
                    held += 1
                    assert left < box[0]
                    assert top < box[1]
                    assert box[2] < right
                    assert box[3] < bottom
        assert held > 5


@needs_chromium
def test_a_run_without_modules_and_decisions_opens(page: Page) -> None:
    page.open(bt.trace(lambda x: x + 1, torch.ones(2)))
    assert len(page.names()) == 3
    for key in "ecrn":
        page.driver.press(key)
    assert len(page.names()) == 3
    page.driver.press("ArrowRight")
    page.driver.press("ArrowRight")
    assert "x + 1" in page.panel


@needs_chromium
@pytest.mark.all
def test_five_thousand_ops_open_closed_and_are_found(
    page: Page, record_property: pytest.RecordProperty
) -> None:
    trace = bt.trace(Stack(100, 16), torch.ones(1, 4))
    assert len(trace.layers) > 5_000
    page.open(trace)
    milliseconds = page("Number(document.documentElement.dataset.readyMs)")
    record_property("milliseconds until 5,000 ops are open", milliseconds)
    print(f"{len(trace.layers)} values are open after {milliseconds} ms")
    assert 0 < len(page.names()) <= 60
    page.driver.press("/")
    page.driver.type("blocks.77.layers.3")
    page.driver.press("Enter")
    assert page.title == "blocks.77.layers.3:1"
    assert page.is_seen(page.selected[0])
    page.driver.press("Escape")
    page("document.getElementById('expand').click()")
    assert len(page.names()) <= 450
    assert "Stopped at" in page("document.getElementById('note').textContent")
