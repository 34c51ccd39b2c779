"""Synthetic inertial windows with the shape of UCI-HAR, only to try things out: of no real person.

Moving classes are sums of three harmonics of a step frequency, with amplitudes by class, sensor
and axis; resting classes are gravity along an axis by class, with sway. A subject has a gain, a
pace, a way to wear the phone (a rotation) and a sensor offset, so that a new subject is harder
than a new window of a known one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from muster_recipes.har.windows import CLASSES, NUM_STEPS, Windows

_RATE_HZ = 50.0
_STEP_HZ = (1.85, 1.65, 2.05)
_TEST_SHARE = 0.3

# [moving class, axis, harmonic]: acceleration in g, and rotation in rad/s.
_ACCELERATION = np.array(
    [
        [[0.22, 0.14, 0.05], [0.12, 0.06, 0.04], [0.10, 0.08, 0.03]],
        [[0.20, 0.10, 0.07], [0.10, 0.09, 0.03], [0.15, 0.06, 0.04]],
        [[0.24, 0.19, 0.11], [0.13, 0.08, 0.06], [0.11, 0.11, 0.05]],
    ]
)
_ROTATION = np.array(
    [
        [[0.30, 0.20, 0.10], [0.25, 0.15, 0.06], [0.20, 0.12, 0.06]],
        [[0.38, 0.15, 0.08], [0.22, 0.20, 0.06], [0.24, 0.09, 0.05]],
        [[0.30, 0.27, 0.14], [0.30, 0.16, 0.10], [0.18, 0.17, 0.08]],
    ]
)
# Direction of gravity by class, before the subject's rotation.
_GRAVITY = np.array(
    [
        [1.0, -0.15, 0.05],
        [1.0, -0.22, 0.12],
        [1.0, -0.10, 0.00],
        [0.85, 0.35, 0.40],
        [1.0, -0.15, 0.08],
        [0.05, 0.75, 0.65],
    ]
)


def make_windows(num_subjects: int, per_subject: int, seed: int) -> tuple[Windows, Windows]:
    """Train and test windows, of different subjects (numbered from 1).

    A subject's windows do not depend on how many subjects there are.
    """
    made = [_subject_windows(seed, subject, per_subject) for subject in range(1, num_subjects + 1)]
    num_test = max(1, round(_TEST_SHARE * num_subjects))
    return _joined(made[:-num_test]), _joined(made[-num_test:])


def _joined(parts: list[Windows]) -> Windows:
    columns = zip(*((part.signals, part.labels, part.subjects) for part in parts), strict=True)
    return Windows(*map(np.concatenate, columns))


def _subject_windows(seed: int, subject: int, count: int) -> Windows:
    stream = np.random.default_rng((seed, subject))
    gain = stream.lognormal(0.0, 0.15)
    pace = stream.normal(1.0, 0.06)
    rotation = _rotation(stream.normal(0.0, 0.18, 3))
    offset = stream.normal(0.0, 0.03, (6, 1))
    shape = np.exp(stream.normal(0.0, 0.15, (2, 3, 3)))  # harmonics of this one's steps
    labels = np.arange(count) % len(CLASSES)
    signals = np.stack(
        [_window(stream, label, gain, pace, rotation, offset, shape) for label in labels.tolist()]
    )
    return Windows(
        signals.astype(np.float32), labels.astype(np.int64), np.full(count, subject, np.int64)
    )


def _window(
    stream: np.random.Generator,
    label: int,
    gain: float,
    pace: float,
    rotation: NDArray[np.float64],
    offset: NDArray[np.float64],
    shape: NDArray[np.float64],
) -> NDArray[np.float64]:
    """[9, 128]: body acceleration, rotation rate, acceleration with gravity."""
    time = np.arange(NUM_STEPS) / _RATE_HZ
    if label < len(_STEP_HZ):
        hertz = _STEP_HZ[label] * pace * stream.normal(1.0, 0.03)
        phases = stream.uniform(0, 2 * np.pi) * np.arange(1, 4) + _PHASES
        angles = 2 * np.pi * hertz * np.arange(1, 4)[:, None] * time  # [harmonic, time]
        waves = np.sin(angles + phases[..., None])  # [sensor, axis, harmonic, time]
        sizes = np.stack([_ACCELERATION[label], _ROTATION[label]]) * shape * gain
        sizes = sizes * np.exp(stream.normal(0.0, 0.15, sizes.shape))
        body, rate = (sizes[..., None] * waves).sum(2)
        noise = 0.06
    else:
        sway = np.sin(2 * np.pi * stream.uniform(0.1, 0.5) * time + stream.uniform(0, 6.28))
        body = 0.012 * gain * stream.normal(size=(3, 1)) * sway
        rate = 0.03 * gain * stream.normal(size=(3, 1)) * sway
        noise = 0.012
    gravity = _GRAVITY[label] + stream.normal(0.0, 0.05, 3)
    gravity = gravity / np.linalg.norm(gravity)
    body = rotation @ body + stream.normal(0.0, noise, body.shape)
    rate = rotation @ rate + stream.normal(0.0, 2 * noise, rate.shape)
    total = body + (rotation @ gravity)[:, None] + offset[:3]
    return np.concatenate([body, rate + offset[3:], total])


#: Phases of the harmonics by sensor and axis: part of what a step is, not of the subject.
_PHASES = np.random.default_rng(7).uniform(0, 2 * np.pi, (2, 3, 3))


def _rotation(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rotation about ``vector`` by its length (Rodrigues' formula)."""
    angle = float(np.linalg.norm(vector))
    x, y, z = vector / angle
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.asarray(np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross)
