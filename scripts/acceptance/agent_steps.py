"""Steps about generated text and about agents."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from acceptance.here import Here


def generation(here: Here) -> None:
    """The engine's texts on the card, and how much faster a batch is than one at a time."""
    here.pytest("test_generation_gpu.py")
    import muster_recipes.arith
    from muster_recipes.arith.problems import make

    weights = Path(next(iter(muster_recipes.arith.__path__))) / "weights"
    problems = [make(1, "test", n, 1 + n % 4).text for n in range(here.size(512, 4))]
    rates = {}
    for batch in (1, 32, 128) if not here.rehearse else (1, 4):
        # One at a time takes a while: a part of the prompts tells.
        asked = problems[: here.size(48, 2)] if batch == 1 else problems
        rates[batch] = asyncio.run(_rate(str(weights), asked, batch, here))
    here.note("tokens/s by the size of the batch", {k: round(v, 1) for k, v in rates.items()})
    gain = max(rates.values()) / rates[1]
    here.goal("generation, times one at a time", gain)


async def _rate(model: str, problems: list[str], batch: int, here: Here) -> float:
    from muster.pipeline.engines.engine import EngineSpec, Request, Sampling
    from muster.pipeline.engines.local import TransformersEngine

    engine = TransformersEngine(EngineSpec(model=model, batch_size=batch))
    await engine.start("cuda:0" if here.device == "cuda" else "cpu")
    try:
        sampling = Sampling(max_tokens=here.size(192, 8))
        asked = [
            Request(messages=({"role": "user", "content": text},), sampling=sampling)
            for text in problems
        ]
        await engine.generate(asked[0])
        begin_s = time.perf_counter()
        made: list[Any] = await asyncio.gather(*map(engine.generate, asked))
        seconds = time.perf_counter() - begin_s
    finally:
        await engine.stop()
    return float(sum(len(each.text) for each in made) / seconds)


def agents(here: Here) -> None:
    """No host wait per step, graphs that pay, and the recipe at its full width."""
    here.pytest("test_agents_gpu.py")
    rates = []
    for more in ((), ("--compile",)) if not here.rehearse else ((),):
        run = f"clstm-{len(more)}"
        envs = here.size(4096, 4)
        here.muster(
            "train", "clstm-ppo", "--devices", here.devices, "--num-envs", str(envs),
            "--num-steps", str(here.size(6 * 4096 * 64, 6 * 16)), "--no-tensorboard", "--quiet",
            "--run-dir", run, *more, *(_SMALL if here.rehearse else ()),
        )  # fmt: skip
        results = json.loads((here.folder / run / "training_results.json").read_text())
        rates.append(results["measured"]["steps_per_s"])
        here.note(f"steps/s {' '.join(more) or 'uncompiled'}", rates[-1])
    gain = rates[-1] / rates[0]
    here.fast("compiled, times uncompiled", gain, at_least=1.5)


_SMALL = (
    "--sim-symbols", "4", "--sim-bars", "700", "--hidden", "8", "--rollout-steps", "4",
    "--batch-size", "4", "--update-epochs", "1", "--episode-bars", "20",
)  # fmt: skip
