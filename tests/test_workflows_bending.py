"""Bending generators of sound and images with parameters that are changed while calls go on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.workflows import bending_session, sweep
from tests.lens_models import hooked, made, same, untouched


class Oscillators(nn.Module):
    """Harmonics and filtered noise from features of a sound, as a DDSP decoder makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 12, batch_first=True)
        self.harmonics, self.bands = nn.Linear(12, 4), nn.Linear(12, 9)
        self.register_buffer("window", torch.hann_window(16))

    def forward(self, pitch: Tensor, loudness: Tensor, noise: Tensor) -> Tensor:
        hidden, _ = self.gru(torch.stack([pitch.log(), loudness], -1))
        amplitudes = self.harmonics(hidden).sigmoid() * loudness[..., None]
        amplitudes = F.interpolate(amplitudes.mT, scale_factor=8, mode="linear").mT
        phase = (pitch.repeat_interleave(8, 1) / 8).cumsum(1) * 2 * math.pi / 16
        wave = torch.sin(phase[..., None] * torch.arange(1, 5)) * amplitudes
        spectrum = torch.stft(noise, 16, 8, window=self.window, return_complex=True)
        gains = F.pad(self.bands(hidden).sigmoid().mT, (0, 1), mode="replicate")
        hiss = torch.istft(spectrum * gains, 16, 8, window=self.window, length=noise.shape[-1])
        return wave.sum(-1) + hiss


class Upsampler(nn.Module):
    """Sound from a latent, by transposed convolutions; louder ones are squeezed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.ConvTranspose1d(4, 8, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.ConvTranspose1d(8, 1, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, z: Tensor) -> Tensor:
        wave = self.body(z)
        while wave.abs().max() > 0.9:
            wave = wave * 0.8
        return wave


class Images(nn.Module):
    """Images from a latent, as a DCGAN makes them, with noise as in a StyleGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.style = nn.Linear(6, 8)
        self.first = nn.ConvTranspose2d(6, 8, 4)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.ConvTranspose2d(8, 3, 4, 2, 1)

    def forward(self, z: Tensor) -> Tensor:
        h = self.norm(self.first(z[..., None, None])) * self.style(z)[..., None, None]
        h = F.leaky_relu(h + 0.1 * torch.randn_like(h), 0.2)
        return torch.tanh(self.second(h))


def sound() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    pitch = torch.rand(2, 10, generator=generator) + 1
    return pitch, torch.rand(2, 10, generator=generator), torch.randn(2, 80, generator=generator)


def test_a_sound_is_bent_by_live_parameters_on_one_trace() -> None:
    model = made(Oscillators)
    plain = model(*sound())
    bright = bt.bends.BendingParameter("bright", 0.0, range=(-4, 4))
    gain = bt.bends.BendingParameter("gain", 1.0)
    bends = {"harmonics$": bt.bends.Bias(bright), "bands": bt.bends.Scale(gain)}
    bended = bt.BendedModule(model)
    bended(*sound())
    with untouched(model):
        with bending_session(bended, bends) as session:
            session(*sound())
            traces = bended.stats.traces
            for one, other in ((0.0, 1.0), (2.0, 0.5), (-3.0, 4.0)):
                session.set(bright=one, gain=other)
                with (
                    hooked(model.harmonics, lambda m, a, out, one=one: out + one),
                    hooked(model.bands, lambda m, a, out, other=other: out * other),
                ):
                    wanted = model(*sound())
                same(session(*sound()), wanted)
            assert bended.stats.traces == traces
            assert sorted(session.parameters) == ["bright", "gain"]
            assert "bright=-3.0" in repr(session)
        assert bended.insertions == ()
        same(bended(*sound()), plain)


def test_a_sweep_gives_what_each_value_gives() -> None:
    model = made(Upsampler)
    z = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(0))
    gain = bt.bends.BendingParameter("gain", 1.0)
    values = [0.0, 0.5, 1.0, 8.0, 40.0]
    bended = bt.BendedModule(model)
    bended(z)
    with bending_session(bended, {"body.2": bt.bends.Scale(gain)}) as session:
        found = session.sweep(z, "gain", values)
        assert gain.value == 1.0
        for value, out in found:
            with hooked(model.body[2], lambda m, a, o, value=value: o * value):
                wanted = model(z)
            same(out, wanted)
        assert len(found) == 5
        assert found.stack().shape == (5, 1, 1, 24)
        assert found.traces >= 2  # the loop runs more often for great ones
        again = sweep(bended, z, gain, values)
        assert again.traces == 0
        same(again.stack(), found.stack())


def test_images_are_bent_by_channel_and_noise_can_be_held_still() -> None:
    model = made(Images)
    z = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    channel = torch.zeros(8, 1, 1)
    channel[3] = 1
    amount = bt.bends.BendingParameter("amount", 0.0)
    bended = bt.BendedModule(model)
    with untouched(model), bending_session(bended, {"norm": bt.bends.Bias(amount * channel)}):
        rng = torch.get_rng_state()
        found = sweep(bended, z, "amount", [0.0, 1.0, 3.0], seed=7)
        assert torch.equal(torch.get_rng_state(), rng)
        for value, out in found:
            with hooked(model.norm, lambda m, a, o, value=value: o + value * channel):
                with torch.random.fork_rng():
                    torch.manual_seed(7)
                    wanted = model(z)
            same(out, wanted)
        assert found.traces == 1


def test_without_a_seed_numbers_are_drawn_on_as_in_calls() -> None:
    model = made(Images)
    z = torch.randn(2, 6)
    amount = bt.bends.BendingParameter("amount", 1.0)
    torch.manual_seed(2)
    wanted = [model(z) for _ in range(3)]
    after = torch.get_rng_state()
    bended = bt.BendedModule(model)
    bended(z)
    with bending_session(bended, {"norm": bt.bends.Scale(amount)}) as session:
        torch.manual_seed(2)
        for one, other in zip(session.sweep(z, "amount", [1.0] * 3).outputs, wanted, strict=True):
            same(one, other)
    assert torch.equal(torch.get_rng_state(), after)


def test_a_trained_direction_is_a_parameter_as_well() -> None:
    model = made(Images)
    direction = bt.bends.BendingParameter("direction", torch.zeros(8, 1, 1, requires_grad=True))
    with bending_session(model, {"norm": bt.bends.Bias(direction)}) as session:
        session(torch.ones(1, 6)).mean().backward()
    assert direction.value.grad.abs().sum() > 0
    model.zero_grad()


def test_a_session_takes_out_its_own_bends_only_and_also_after_errors() -> None:
    bended = bt.BendedModule(made(Upsampler))
    bended(torch.randn(1, 4, 6))
    other = bended.bend(bt.bends.Scale(2.0), "body.0")
    gain = bt.bends.BendingParameter("gain", 1.0)
    with (
        pytest.raises(ZeroDivisionError),
        bending_session(bended, {"body.2": bt.bends.Scale(gain)}),
    ):
        raise ZeroDivisionError
    assert bended.bended_keys() == ["body.sub_0"]
    with pytest.raises(InputError):  # the second pattern means nothing
        bending_session(
            bended, {"body.2": [bt.bends.Scale(gain), torch.tanh], "nothing": bt.bends.Bias(1.0)}
        )
    assert bended.bended_keys() == ["body.sub_0"]
    other.remove()


def test_values_and_names_that_are_none_are_refused_before_anything_is_called() -> None:
    model = made(Upsampler)
    bended = bt.BendedModule(model)
    z = torch.randn(1, 4, 6)
    bended(z)
    gain = bt.bends.BendingParameter("gain", 0.5, range=(0, 1))
    with bending_session(bended, {"body.2": bt.bends.Scale(gain)}) as session:
        replays = bended.stats.replays
        for call in (
            lambda: session.sweep(z, "gain", [0.1, 2.0]),
            lambda: session.sweep(z, "gain", []),
            lambda: session.sweep(z, "pain", [0.1]),
            lambda: sweep(bended, z, "pain", [0.1]),
            lambda: session.set(gain=3.0),
            lambda: session.set(pain=3.0),
        ):
            with pytest.raises(InputError):
                call()
        assert bended.stats.replays == replays
        assert gain.value == 0.5
    for bends in ({}, [], {"body.2": 3}):
        with pytest.raises(bt.BendtraceError):
            bending_session(bended, bends)  # type: ignore[arg-type]
    assert bended.insertions == ()


def test_sweeps_of_other_things_than_tensors_are_kept_as_they_are() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Any:
            h = self.act(x)
            return h[h > 1], {"h": h}

    gain = bt.bends.BendingParameter("gain", 1.0)
    x = torch.tensor([0.5, 2.0])
    bended = bt.BendedModule(Pair())
    with bending_session(bended, {"act$": bt.bends.Scale(gain)}) as session:
        found = session.sweep(x, "gain", [1.0, 4.0])
    same([out[0] for out in found.outputs], [torch.tensor([2.0]), torch.tensor([2.0, 8.0])])
    with pytest.raises(InputError, match="only tensors"):
        found.stack()


def test_a_scale_of_a_steering_vector_is_swept_too() -> None:
    from bendtrace.workflows import steer
    from tests.lens_models import WIDTH, Transformer, tokens

    model = made(Transformer)
    amount = bt.bends.BendingParameter("amount", 0.0)
    bended = bt.BendedModule(model)
    with steer(bended, torch.ones(WIDTH), "blocks.0", scale=amount):
        found = sweep(bended, tokens(), amount, [0.0, 2.0])
    with hooked(model.blocks[0], lambda m, a, o: o + 2.0 * torch.ones(WIDTH)):
        same(found.outputs[1], model(tokens()))
    same(found.outputs[0].detach(), model(tokens()).detach())


def test_each_call_of_a_sweep_begins_with_the_same_inputs() -> None:
    def model(x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(torch.relu(x))
        x += 1
        return torch.stack(seen).sum(0)

    x, seen = torch.ones(2), [torch.ones(2)]
    bended, gain = bt.BendedModule(model), bt.bends.BendingParameter("gain", 1.0)
    bended.bend(bt.bends.Scale(gain), "relu", allow_none=True)
    found = sweep(bended, (x, seen), gain, [1.0, 1.0, 3.0, 1.0])
    assert [out.tolist() for out in found.outputs] == [[2, 2], [2, 2], [4, 4], [2, 2]]
    assert x.tolist() == [1, 1]
    assert len(seen) == 1
    leaf = torch.ones(2, requires_grad=True)
    other = bt.BendedModule(lambda x: torch.relu(x) * 2)
    other.bend(bt.bends.Scale(gain), "relu", allow_none=True)
    sweep(other, leaf, gain, [3.0]).outputs[0].sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [6, 6]
