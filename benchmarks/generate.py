"""Tokens per second of the engine ``transformers`` beside hand-written loops of ``model.generate``.

    python benchmarks/generate.py            # about 3 minutes
    python benchmarks/generate.py --quick    # one round, fewer prompts

The same model, prompts and greedy decoding for all, one thread. "one at a time" calls
``model.generate`` for each record; "by hand" calls it for batches of --batch-size records, in the
order of the input, padded at the left; "by hand, sorted" sorts all records by length before;
"the library's" is the continuous batching of transformers, its manager started before.
Only tokens of the answers count, not the padding. Loading the model is not timed. All texts are
compared with those of "one at a time". Ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))
import torch
from transformers import ContinuousBatchingConfig

import muster_recipes.arith
from measuring import alternate, goal, machine, summary, table, write_json
from muster.pipeline.engines.engine import Engine, EngineSpec, Request, Sampling, shared
from muster_recipes.arith.problems import make

WEIGHTS = Path(next(iter(muster_recipes.arith.__path__))) / "weights"
ALONE, HAND, SORTED, ENGINE = "one at a time", "by hand", "by hand, sorted", "muster"
LIBRARY = "the library's"


_now = time.perf_counter


@dataclass
class Model:
    """The model as a hand-written program has it."""

    network: Any
    tokenizer: Any
    max_tokens: int
    device: str

    def prompt(self, problem: str) -> str:
        chat = [{"role": "user", "content": problem}]
        text: str = self.tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        return text

    def answers(self, problems: list[str]) -> list[list[int]]:
        inputs = self.tokenizer(
            [self.prompt(problem) for problem in problems],
            return_tensors="pt",
            padding=True,
            add_special_tokens=False,
        ).to(self.device)
        with torch.inference_mode():
            out = self.network.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=self.max_tokens,
                do_sample=False,
            )
        rows = out[:, inputs["input_ids"].shape[1] :].tolist()
        return [self._to_the_end(row) for row in rows]

    def _to_the_end(self, row: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        return row[: row.index(end) + 1] if end in row else row


def by_hand(model: Model, problems: list[str], size: int, is_sorted: bool) -> list[list[int]]:
    order = list(range(len(problems)))
    if is_sorted:
        order.sort(key=lambda place: len(problems[place]))
    found: dict[int, list[int]] = {}
    for begin in range(0, len(order), size):
        places = order[begin : begin + size]
        found.update(zip(places, model.answers([problems[at] for at in places]), strict=True))
    return [found[place] for place in range(len(problems))]


async def with_engine(engine: Engine, problems: list[str], max_tokens: int) -> list[Any]:
    room = asyncio.Semaphore(engine.concurrency)

    async def one(problem: str) -> Any:
        request = Request(
            messages=({"role": "user", "content": problem},),
            sampling=Sampling(max_tokens=max_tokens),
        )
        async with room:
            return await engine.generate(request)

    return await asyncio.gather(*map(one, problems))


class Bench:
    """Runs a contender, keeps its texts, returns its tokens per second."""

    def __init__(
        self, model: Model, paged: Model, engine: Engine, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.model, self.paged, self.engine, self.loop = model, paged, engine, loop
        self.texts: dict[str, list[str]] = {}

    def loop_of_generate(self, name: str, problems: list[str], size: int) -> float:
        began = _now()
        rows = by_hand(self.model, problems, size, name == SORTED)
        took_s = _now() - began
        self.texts[name] = self.model.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return sum(map(len, rows)) / took_s

    def continuous_batching(self, problems: list[str], size: int) -> float:
        tokenizer, network = self.paged.tokenizer, self.paged.network
        settings = network.generation_config
        settings.do_sample, settings.max_new_tokens = False, self.paged.max_tokens
        prompts = [
            tokenizer(self.paged.prompt(problem), add_special_tokens=False)["input_ids"]
            for problem in problems
        ]
        began = _now()
        found = network.generate_batch(
            inputs=prompts,
            generation_config=settings,
            continuous_batching_config=ContinuousBatchingConfig(
                max_requests_per_batch=size, num_blocks=4 * size, max_batch_tokens=16 * size
            ),
            persistent_manager=True,
        )
        took_s = _now() - began
        rows = [output.generated_tokens for output in found.values()]
        self.texts[LIBRARY] = tokenizer.batch_decode(rows, skip_special_tokens=True)
        return sum(map(len, rows)) / took_s

    def engine_of_muster(self, problems: list[str]) -> float:
        began = _now()
        done = self.loop.run_until_complete(
            with_engine(self.engine, problems, self.model.max_tokens)
        )
        took_s = _now() - began
        self.texts[ENGINE] = [completion.text for completion in done]
        return sum(completion.completion_tokens for completion in done) / took_s


def load(folder: Path, device: str, dtype: str, max_tokens: int) -> Model:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return Model(network.eval(), tokenizer, max_tokens, device)


def same(texts: dict[str, list[str]], name: str) -> float:
    """The share of texts that are those of "one at a time"."""
    pairs = list(zip(texts[name], texts[ALONE], strict=False))
    return sum(a == b for a, b in pairs) / len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=WEIGHTS)
    parser.add_argument("--prompts", type=int, default=384)
    parser.add_argument("--alone", type=int, default=48, help="of them, for one at a time")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cpu-time", action="store_true", help="for a machine that others use")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.prompts, args.alone = 1, 64, 8
    global _now
    if args.cpu_time:
        _now = time.process_time
    torch.set_num_threads(1)
    problems = [make(0, "test", index, 1 + index % 6).text for index in range(args.prompts)]
    model = load(args.model, args.device, args.dtype, args.max_tokens)
    paged = load(args.model, args.device, args.dtype, args.max_tokens)
    spec = EngineSpec(
        model=str(args.model),
        dtype=args.dtype,
        batch_size=args.batch_size,
        compile=args.compile,
    )
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        lent = loop.run_until_complete(shared(spec, args.device))
        bench = Bench(model, paged, lent.engine, loop)
        contenders: dict[str, Callable[[], float]] = {
            ALONE: lambda: bench.loop_of_generate(ALONE, problems[: args.alone], 1),
            HAND: lambda: bench.loop_of_generate(HAND, problems, args.batch_size),
            SORTED: lambda: bench.loop_of_generate(SORTED, problems, args.batch_size),
            LIBRARY: lambda: bench.continuous_batching(problems, args.batch_size),
            ENGINE: lambda: bench.engine_of_muster(problems),
        }
        for warm_up in contenders.values():
            warm_up()
        rates = alternate(contenders, args.repeats)
        loop.run_until_complete(lent.close())
        paged.network.destroy_cached_continuous_batching_manager()
    report(args, rates, {name: same(bench.texts, name) for name in contenders})


def report(args: Any, rates: dict[str, list[float]], shares: dict[str, float]) -> None:
    about = machine("transformers")
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}")
    print(f"{args.prompts} prompts, batch size {args.batch_size}, {args.dtype} on {args.device}")
    ratios = {
        base: {
            name: summary([a / b for a, b in zip(rates[name], rates[base], strict=True)])
            for name in rates
        }
        for base in (ALONE, HAND, SORTED, LIBRARY)
    }
    rows = []
    for name, values in rates.items():
        found = summary(values)
        row = [name, f"{found['median']:,.0f}", f"[{found['low']:,.0f}–{found['high']:,.0f}]"]
        row += [f"{ratios[base][name]['median']:.2f}" for base in ratios]
        rows.append([*row, f"{shares[name]:.1%}"])
    table(["", "tokens/s", "range", *(f"× {base}" for base in ratios), "same texts"], rows)
    alone, hand = (ratios[base][ENGINE]["median"] for base in (ALONE, HAND))
    goal("tokens/s, × one at a time", "≥ 5", f"{alone:.2f}", alone >= 5)
    goal("tokens/s, of a loop by hand", "≥ 0.95", f"{hand:.2f}", hand >= 0.95)
    write_json(
        args.json,
        {
            "machine": about,
            "tokens_per_s": {name: summary(values) for name, values in rates.items()},
            "ratios": ratios,
            "same_texts": shares,
        },
    )


if __name__ == "__main__":
    main()
