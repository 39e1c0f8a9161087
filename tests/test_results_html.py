"""Results show themselves as tables with colours in notebooks."""

from __future__ import annotations

import re

import pytest
import torch

import bendtrace as bt
from bendtrace.show.paint import color, color_around_zero, heat_map


def model(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * torch.tensor([1.0, 10.0, 100.0])


def cells(html: str) -> int:
    return html.count("<td")


def test_a_grid_has_a_coloured_cell_for_each_number() -> None:
    found = bt.workflows.activation_patching(
        model, torch.ones(1, 3), torch.zeros(1, 3), ["relu"], torch.sum, positions="each"
    )
    html = found._repr_html_()
    assert cells(html) == 3
    assert "<caption>Patching (denoise)" in html
    assert all(f">{number}<" in html for number in ("0.009", "0.090", "0.901"))
    assert html.count("background: #") == 3


def test_studies_and_paths_are_tables_too() -> None:
    study = bt.workflows.ablation_study(model, torch.ones(1, 3), ["relu", "mul"], torch.sum)
    assert cells(study._repr_html_()) == 2
    found = bt.workflows.path_patching(
        model, torch.ones(1, 3), torch.zeros(1, 3), ["relu"], ["mul"], torch.sum
    )
    assert "<th>to mul</th>" in found._repr_html_()


def test_a_lens_shows_the_best_classes_and_colours_their_probabilities() -> None:
    layers = torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 5)
    net = torch.nn.Sequential(*layers)
    found = bt.workflows.logit_lens(
        net, torch.ones(2, 3), ["0", "1"], unembed=["2"], decode="<{}>".format
    )
    html = found._repr_html_()
    assert cells(html) == 2
    best = found.top()["sub_1"][0].item()
    assert f"&lt;{best}&gt;" in html


def test_a_cache_lists_all_of_its_values() -> None:
    _, cache = bt.workflows.run_with_cache(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2))
    assert cells(cache._repr_html_()) == len(cache)


def test_a_difference_has_its_text_and_a_picture() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x.abs()

    difference = bt.diff(
        bt.log_forward_pass(doubled, torch.ones(2)), bt.log_forward_pass(doubled, -torch.ones(2))
    )
    assert "<svg" in difference._repr_html_()


def test_nan_has_no_colour_and_names_are_escaped() -> None:
    html = heat_map("a & b", ["<0>"], ["x"], [[float("nan")]])
    assert "background: #ffffff" in html
    assert "&lt;0&gt;" in html
    assert "a &amp; b" in html


def test_numbers_of_both_signs_have_white_at_zero_and_stand_at_the_right() -> None:
    html = heat_map("", ["a", "b", "c", "d"], ["x"], [[-1.0, 0.0, 2.0, -2.0]])
    fills = re.findall(r"background: (#\w+)", html)
    assert fills == [color_around_zero(part) for part in (-0.5, 0.0, 1.0, -1.0)]
    assert html.count("text-align: right") == 4
    of_one_sign = heat_map("", ["a", "b"], ["x"], [[1.0, 3.0]])
    assert re.findall(r"background: (#\w+)", of_one_sign) == [color(0.0), color(1.0)]


def test_a_grid_is_plotted_in_the_same_colours() -> None:
    pytest.importorskip("matplotlib")
    study = bt.workflows.ablation_study(model, torch.ones(1, 3), ["relu", "mul"], torch.sum)
    (axes, bar) = study.plot().axes
    image = axes.images[0]
    assert image.get_array().flatten().tolist() == study.effect.flatten().tolist()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["relu", "mul"]
    assert bar is not axes
