"""Labels for the heads of models, and one step of training with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.promise import bits
from tools.hub.inputs import Guess, Inputs, guessed

Labels = Callable[[Guess, Inputs], Inputs]


def _next_tokens(guess: Guess, made: Inputs) -> Inputs:
    return {"labels": made["input_ids"].clone()}


def _one_each(guess: Guess, made: Inputs) -> Inputs:
    return {"labels": torch.tensor([0, 1])}


def _token_classes(guess: Guess, made: Inputs) -> Inputs:
    return {"labels": made["input_ids"] % 2}


def _span(guess: Guess, made: Inputs) -> Inputs:
    return {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 3])}


def _choices(guess: Guess, made: Inputs) -> Inputs:
    two = {name: torch.stack([value, value.flip(1)], 1) for name, value in made.items()}
    return two | {"labels": torch.tensor([0, 1])}


def _decoded(guess: Guess, made: Inputs) -> Inputs:
    if not guess.config.is_encoder_decoder and "input_ids" in made:
        return _next_tokens(guess, made)
    made.pop("decoder_input_ids", None)  # what is to be said, moved by one
    return {"labels": guess.tokens(5)}


def _map_of_classes(guess: Guess, made: Inputs) -> Inputs:
    height, width = made["pixel_values"].shape[-2:]
    drawn = torch.rand(2, height, width, generator=guess.generator)
    return {"labels": (drawn > 0.5).long()}


def _boxes(guess: Guess, made: Inputs) -> Inputs:
    """Two objects in the first image, one in the second."""
    box = torch.tensor([[0.5, 0.5, 0.25, 0.5], [0.25, 0.375, 0.25, 0.25]])
    return {
        "labels": [
            {"class_labels": torch.tensor([0, 1]), "boxes": box},
            {"class_labels": torch.tensor([1]), "boxes": box[1:]},
        ]
    }


def _characters(guess: Guess, made: Inputs) -> Inputs:
    return {"labels": torch.tensor([[5, 6], [7, 8]])}


HEADS: dict[str, Labels] = {
    "AutoModelForCausalLM": _next_tokens,
    "AutoModelForMaskedLM": _next_tokens,
    "AutoModelForSequenceClassification": _one_each,
    "AutoModelForTokenClassification": _token_classes,
    "AutoModelForQuestionAnswering": _span,
    "AutoModelForMultipleChoice": _choices,
    "AutoModelForSeq2SeqLM": _decoded,
    "AutoModelForSpeechSeq2Seq": _decoded,
    "AutoModelForImageClassification": _one_each,
    "AutoModelForSemanticSegmentation": _map_of_classes,
    "AutoModelForObjectDetection": _boxes,
    "AutoModelForAudioClassification": _one_each,
    "AutoModelForCTC": _characters,
}


def types_with(auto: str) -> list[str]:
    """Return the types of models that have a class for an Auto class."""
    import transformers

    mapping = getattr(transformers, auto)._model_mapping
    return list(mapping._model_mapping)


def labelled(auto: str, model: Any, seed: int = 0) -> tuple[str, Inputs]:
    """Return inputs for a model of an Auto class, with labels."""
    if auto == "AutoModelForMultipleChoice":  # takes no plain texts
        made = Guess(model, seed).text()
        return "two texts", HEADS[auto](Guess(model, seed), made)
    kind, made = guessed(model, seed)
    labels = HEADS[auto](Guess(model, seed), made)
    return kind, made | labels


def trained(call: Callable[..., Any], model: Any, inputs: Inputs, seed: int) -> Any:
    """Return the bits of the loss, the outputs, all gradients and the random state after a step."""
    model.zero_grad()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    out = call(**inputs)
    out.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return bits([out.loss, out.to_tuple(), gradients]), torch.get_rng_state().tolist()
