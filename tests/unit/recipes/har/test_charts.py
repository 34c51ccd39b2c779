"""Line charts as tensors."""

from __future__ import annotations

import math

import torch

from muster_recipes.har.nets import line_charts


def test_a_constant_is_a_level_line_of_two_pixels() -> None:
    for value, middle in ((0.0, 111.5), (4.0, 0.0), (-4.0, 223.0), (9.0, 0.0), (2.0, 55.75)):
        image = line_charts(torch.full((1, 128), value))[0]
        assert image.shape == (224, 224)
        assert torch.equal(image, image[:, :1].expand(224, 224))
        rows = torch.arange(224.0)
        ink = (1.5 - (rows - middle).abs()).clamp(0, 1)
        torch.testing.assert_close(image[:, 0], ink, atol=1e-4, rtol=0)


def test_the_ink_of_each_column_is_where_the_curve_is() -> None:
    time = torch.linspace(0, 4 * math.pi, 128)
    image = line_charts(3 * time.sin())
    rows = torch.arange(224.0)[:, None]
    centre = (image * rows).sum(0) / image.sum(0)
    moments = torch.linspace(0, 4 * math.pi, 224 + 1)
    expected = (4 - 3 * moments.sin()) / 8 * 223
    expected = (expected[:-1] + expected[1:]) / 2
    assert float((centre - expected).abs().max()) < 1.0


def test_a_jump_is_a_connected_line() -> None:
    signal = torch.cat([torch.full((64,), -3.0), torch.full((64,), 3.0)])
    image = line_charts(signal) > 0.5
    assert bool(image[28:195].any(1).all()), "every row between the levels has ink"
    assert bool(image.any(0).all()), "every column has ink"


def test_images_do_not_depend_on_their_neighbours() -> None:
    signals = torch.randn(2, 9, 128)
    images = line_charts(signals, 64)
    assert images.shape == (2, 9, 64, 64)
    torch.testing.assert_close(images[1, 4], line_charts(signals[1, 4], 64))
    assert 0 <= float(images.min()) and float(images.max()) <= 1
