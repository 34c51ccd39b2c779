"""The engine ``transformers``: a text is a function of model, prompt, sampling and seed."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers  # its names are loaded when they are used, not where tests are collected

from muster.base.errors import SetupError, UsageError
from muster.pipeline.engines.decoding import draw, uniform
from muster.pipeline.engines.engine import (
    Completion,
    EngineError,
    EngineSpec,
    Message,
    Request,
    RequestError,
    Sampling,
)
from muster.pipeline.engines.local import TransformersEngine
from muster.pipeline.stages import METER
from muster_recipes.arith import tokenizer as characters

pytestmark = pytest.mark.thorough

POSITIONS = 160
#: Several, so that about every eighth token ends an answer of the random model.
ENDS = [characters.EOS, *range(20, 32)]


def save(folder: Path, config: Any, kind: Any) -> Path:
    torch.manual_seed(0)
    model = kind(config).double()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.4)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=ENDS, pad_token_id=characters.PAD
    )
    model.save_pretrained(folder)
    characters.save(folder, POSITIONS)
    return folder


SIZES: dict[str, Any] = {
    "vocab_size": len(characters.VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": characters.BOS,
    "eos_token_id": characters.EOS,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(
        tmp_path_factory.mktemp("tiny"),
        transformers.LlamaConfig(**SIZES),
        transformers.LlamaForCausalLM,
    )


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.MistralConfig(**SIZES, sliding_window=12)
    return save(tmp_path_factory.mktemp("sliding"), config, transformers.MistralForCausalLM)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def answers(
    model: Path, requests: Sequence[Request], batch_size: int, **settings: Any
) -> list[Completion]:
    return run(model, requests, batch_size, **settings)[0]


def run(
    model: Path, requests: Sequence[Request], batch_size: int, **settings: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Completions, or the errors in their places, and the engine's numbers."""

    async def all_of_them() -> tuple[list[Any], dict[str, Any]]:
        engine = TransformersEngine(
            EngineSpec(model=str(model), batch_size=batch_size, dtype="float64", **settings)
        )
        await engine.start("cpu")
        try:
            made = await asyncio.gather(
                *(engine.generate(request) for request in requests), return_exceptions=True
            )
            return list(made), dict(engine.stats())
        finally:
            await engine.stop()

    return asyncio.run(all_of_them())


def mixed_requests(count: int) -> list[Request]:
    """Prompts of 1 to 60 characters, greedy and sampled in turn, some with stop texts."""
    chance = random.Random(5)
    requests = []
    for number in range(count):
        text = "".join(chance.choices("0123456789+-*()", k=chance.randint(1, 60)))
        sampling = Sampling(
            temperature=(0.0, 0.7, 1.0, 1.5)[number % 4],
            top_p=(1.0, 0.9, 0.5)[number % 3],
            max_tokens=(40, 7, 25, 1)[number // 2 % 4],
            stop=(("7", "ab"), ())[number % 2],
        )
        requests.append(Request(prompt=text, sampling=sampling, seed=chance.getrandbits(62)))
    return requests


def slowly(folder: Path, request: Request) -> Completion:
    """By definition: no batch, no cache, all tokens decoded again after each one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(request.prompt)["input_ids"]
    made: list[int] = []
    sampling = request.sampling

    def completion(text: str, reason: Any) -> Completion:
        return Completion(
            text=text,
            finish_reason=reason,
            prompt_tokens=len(prompt),
            completion_tokens=len(made),
        )

    while True:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + made])).logits[:, -1]
        noise = uniform(request.seed, len(made))
        made += draw(logits, [sampling.temperature], [sampling.top_p], [noise]).tolist()
        text = tokenizer.decode(made, skip_special_tokens=True)
        if made[-1] in ENDS:
            return completion(text, "stop")
        places = [text.find(stop) for stop in sampling.stop if stop in text]
        if places:
            return completion(text[: min(places)], "stop")
        if len(made) == sampling.max_tokens:
            return completion(text, "length")


def test_texts_are_those_of_the_slow_definition(tiny: Path) -> None:
    requests = mixed_requests(24)
    assert answers(tiny, requests, 5) == [slowly(tiny, request) for request in requests]


def test_a_text_does_not_depend_on_its_batch_mates(tiny: Path) -> None:
    requests = mixed_requests(40)
    alone = answers(tiny, requests, 1)
    assert len({(one.text, one.finish_reason) for one in alone}) > 20
    assert {one.finish_reason for one in alone} == {"stop", "length"}
    assert answers(tiny, requests, 7) == alone
    assert answers(tiny, requests, 32) == alone
    order = list(range(40))
    random.Random(1).shuffle(order)
    shuffled = answers(tiny, [requests[place] for place in order], 7)
    assert shuffled == [alone[place] for place in order]


def test_a_model_whose_cache_takes_no_late_rows(sliding: Path) -> None:
    requests = mixed_requests(20)
    expected = [slowly(sliding, request) for request in requests]
    assert answers(sliding, requests, 6) == expected


def test_greedy_texts_are_those_of_generate(tiny: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    requests = [
        dataclasses.replace(request, sampling=Sampling(max_tokens=30))
        for request in mixed_requests(12)
    ]
    expected = []
    for request in requests:
        ids = tokenizer(request.prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=30, do_sample=False)
        expected.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    assert [one.text for one in answers(tiny, requests, 4)] == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of its own compiler
@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
def test_a_compiled_model_writes_the_same(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiler sets this variable and leaves it; so it is put back at the end.
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")
    requests = mixed_requests(20)
    assert answers(tiny, requests, 6, compile=True) == answers(tiny, requests, 6)


def test_another_seed_gives_another_text(tiny: Path) -> None:
    sampling = Sampling(temperature=1.0, max_tokens=30)
    requests = [Request(prompt="1+2", sampling=sampling, seed=seed) for seed in range(8)]
    assert len({one.text for one in answers(tiny, requests, 8)}) > 4


def test_messages_get_the_models_chat_template(tiny: Path) -> None:
    chat: tuple[Message, ...] = ({"role": "user", "content": "3*4"},)
    plain = Request(prompt="Q: 3*4\nA: ")
    chosen = Request(messages=chat)
    made = answers(tiny, [plain, chosen], 2)
    assert made[0] == made[1]  # the template writes the start token that the tokenizer adds else


def test_without_a_template_the_contents_stand_alone(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    for file in tiny.iterdir():
        text = file.read_bytes()
        if file.name == "tokenizer_config.json":
            text = text.replace(b'"chat_template"', b'"of_no_meaning"')
        (folder / file.name).write_bytes(text)
    chat: tuple[Message, ...] = (
        {"role": "system", "content": "add"},
        {"role": "user", "content": "3*4"},
    )
    made = answers(folder, [Request(prompt="add\n\n3*4"), Request(messages=chat)], 2)
    assert made[0] == made[1]


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(tiny: Path) -> None:
    requests = [Request(prompt="1" * length) for length in (POSITIONS - 2, POSITIONS - 1, 500)]
    made, _ = run(tiny, requests, 3)
    assert made[0].completion_tokens == 1  # with its start token, one less than the positions
    assert [type(one) for one in made[1:]] == [RequestError, RequestError]
    assert "501 tokens" in str(made[2]) and "room for 160" in str(made[2])


def test_tokens_are_metered_as_they_appear(tiny: Path) -> None:
    before = METER.read()
    made, stats = run(tiny, mixed_requests(10), 4)
    after = METER.read()
    assert after["tokens"] - before.get("tokens", 0) == sum(one.completion_tokens for one in made)
    grown = after["prompt_tokens"] - before.get("prompt_tokens", 0)
    assert grown == sum(one.prompt_tokens for one in made)
    assert stats["requests"] == 10


@dataclass
class SmallDevice:
    """Stands for a device whose memory holds a batch of so many rows."""

    most_rows: int
    words: str = "CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.fixture
def device_of_rows() -> Any:
    """All models of the test run on it; it reports a lack of memory in torch's words."""
    device = SmallDevice(10**9)

    def before(module: Any, args: Any) -> None:
        if isinstance(module, torch.nn.Embedding) and len(args[0]) > device.most_rows:
            raise torch.OutOfMemoryError(device.words)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(before)
    yield device
    handle.remove()


def test_out_of_memory_halves_the_batch_and_changes_no_text(
    tiny: Path, device_of_rows: SmallDevice
) -> None:
    requests = mixed_requests(40)
    expected = answers(tiny, requests, 16)
    device_of_rows.most_rows = 5
    made, stats = run(tiny, requests, 16)
    assert made == expected
    assert stats["out_of_memory"] >= 2
    assert stats["batch_size"] <= 8


def test_the_batch_grows_again_when_there_is_memory(
    tiny: Path, device_of_rows: SmallDevice
) -> None:
    async def scenario() -> tuple[int, int]:
        engine = TransformersEngine(EngineSpec(model=str(tiny), batch_size=8, dtype="float64"))
        await engine.start("cpu")
        try:
            device_of_rows.most_rows = 3
            await asyncio.gather(*map(engine.generate, mixed_requests(12)))
            small = engine.stats()["batch_size"]
            device_of_rows.most_rows = 100
            await asyncio.gather(*map(engine.generate, mixed_requests(300)))
            return small, engine.stats()["batch_size"]
        finally:
            await engine.stop()

    small, large = asyncio.run(scenario())
    assert small == 2
    assert large == 8


@pytest.mark.parametrize("words", ["CUDA out of memory. Tried to allocate 2.00 GiB", ""])
def test_a_prompt_that_does_not_fit_alone_is_an_error_of_its_own(
    tiny: Path, device_of_rows: SmallDevice, words: str
) -> None:
    device_of_rows.most_rows, device_of_rows.words = 0, words
    made, _ = run(tiny, mixed_requests(3), 4)
    assert [type(one) for one in made] == [RequestError] * 3
    assert "with this prompt alone" in str(made[0])


def test_a_model_that_breaks_is_the_engines_error(tiny: Path) -> None:
    def before(module: Any, args: Any) -> None:
        if isinstance(module, torch.nn.Embedding):
            raise RuntimeError("device-side assert triggered")

    handle = torch.nn.modules.module.register_module_forward_pre_hook(before)
    try:
        made, _ = run(tiny, mixed_requests(3), 4)
    finally:
        handle.remove()
    assert [type(one) for one in made] == [EngineError] * 3
    assert "device-side assert" in str(made[0])


def test_a_request_that_is_given_up_leaves_the_batch(tiny: Path) -> None:
    async def scenario() -> tuple[list[Completion], Any]:
        engine = TransformersEngine(EngineSpec(model=str(tiny), batch_size=4, dtype="float64"))
        await engine.start("cpu")
        try:
            tasks = [asyncio.ensure_future(engine.generate(r)) for r in mixed_requests(12)]
            await asyncio.sleep(0.01)
            for task in tasks[::3]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return [task.result() for task in tasks if not task.cancelled()], engine.stats()
        finally:
            await engine.stop()

    made, _ = asyncio.run(scenario())
    alone = answers(tiny, mixed_requests(12), 1)
    assert all(one in alone for one in made) and len(made) >= 8


def test_requests_in_flight_end_when_the_engine_is_stopped(tiny: Path) -> None:
    async def scenario() -> list[Any]:
        engine = TransformersEngine(EngineSpec(model=str(tiny), dtype="float64"))
        await engine.start("cpu")
        sampling = Sampling(max_tokens=100)
        tasks = [
            asyncio.ensure_future(engine.generate(Request(prompt="1", sampling=sampling, seed=s)))
            for s in range(40)
        ]
        await asyncio.sleep(0)
        await engine.stop()
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    assert all(isinstance(one, Completion | EngineError) for one in asyncio.run(scenario()))


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({}, UsageError, "No model is named"),
        ({"model": "x", "dtype": "int3"}, UsageError, "no dtype 'int3'"),
    ],
)
def test_what_cannot_be_is_said_before_the_start(
    settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        TransformersEngine(EngineSpec(**settings))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"cannot be loaded.*\n.*config\.json"):
        run(tmp_path, [], 1)
