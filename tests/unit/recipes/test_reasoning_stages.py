"""Generate, evaluate, improve: with an engine that answers from rules."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.recipes.map_driver import drive, good
from tests.unit.recipes.rule_engine import RULES, Rule, RuleEngine

from muster.pipeline.engines import engine
from muster.pipeline.engines.engine import EngineError, EngineSpec, Request
from muster.pipeline.stages import Reject, make_stage, seed_of, spec_of_object
from muster_recipes.reasoning.grades import WEIGHTS
from muster_recipes.reasoning.stages import Evaluate, Finish, Generate, Improve, Read

_COLUMNS = [
    "id", "problem", "reference_answer", "reasoning", "thinking", "answer", "verification",
    "scores", "ungraded", "quality", "iterations", "versions", "tokens", "model", "engine",
    "sampling",
]  # fmt: skip
_RECORD = {"id": 7, "problem": "What is 3+4?", "reference_answer": "7"}


@pytest.fixture(autouse=True, scope="module")
def _rules() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        rules = "tests.unit.recipes.rule_engine:RuleEngine"
        patch.setattr(engine, "ENGINES", {**engine.ENGINES, "rules": rules})
        yield
    assert RuleEngine.running == 0


def _pipeline(rule: Rule, **changes: Any) -> list[Any]:
    RULES["rule"] = rule
    engine = EngineSpec(engine="rules", model="rule")
    grading = changes.pop("grading", "model")
    rounds = changes.pop("max_iterations", 2)
    return [
        Generate(engine=engine, **changes),
        Evaluate(engine=engine, grading=grading, **changes),
        Improve(engine=engine, grading=grading, max_iterations=rounds, **changes),
        Finish(),
    ]


def _is_grading(request: Request) -> bool:
    return "You grade" in request.messages[0]["content"]


def _is_rewriting(request: Request) -> bool:
    return "An earlier solution" in request.messages[0]["content"]


def _graded(value: float) -> str:
    return json.dumps({**dict.fromkeys(WEIGHTS, value), "feedback": f"worth {value}"})


def test_a_good_solution_goes_straight_through() -> None:
    def rule(request: Request) -> str:
        if _is_grading(request):
            return f"<think>0.1?</think>My grades:\n```json\n{_graded(0.9)}\n```"
        return "<think>easy</think>3+4 is 7, so \\boxed{7}"

    [record] = good(_pipeline(rule), [_RECORD])
    assert list(record) == _COLUMNS
    assert record["reasoning"] == "3+4 is 7, so \\boxed{7}"
    assert record["thinking"] == "easy"
    assert record["answer"] == "7"
    assert record["verification"] == "correct"
    assert record["scores"] == dict.fromkeys(WEIGHTS, 0.9)
    assert record["quality"] == 0.9
    assert record["ungraded"] is False
    assert record["iterations"] == 0
    assert len(record["versions"]) == 1
    assert record["versions"][0]["feedback"] == "worth 0.9"
    assert record["model"] == "rule" and record["engine"] == "rules"
    assert record["sampling"] == {
        "temperature": 0.6, "top_p": 0.95, "max_tokens": 4096, "seed": 0,
    }  # fmt: skip
    assert record["tokens"]["completion"] == len(
        "<think>easy</think>3+4 is 7, so \\boxed{7}".split()
    ) + len(rule(Request(messages=({"role": "system", "content": "You grade"},))).split())


def test_what_the_model_is_asked() -> None:
    asked: list[Request] = []

    def rule(request: Request) -> str:
        asked.append(request)
        if _is_grading(request):
            return json.dumps({**dict.fromkeys(WEIGHTS, 0.9), "logical_coherence": 0.3,
                               "feedback": "a gap"})  # fmt: skip
        return "perhaps \\boxed{8}"

    [record] = good(_pipeline(rule, max_iterations=1), [_RECORD])
    assert record["verification"] == "wrong"
    assert record["quality"] == 0.5, "capped"
    solve, grade, rewrite, _ = asked
    for request in (solve, rewrite):
        assert request.messages[-1] == {"role": "user", "content": "What is 3+4?"}
        assert "\\boxed{}" in request.messages[0]["content"]
        assert request.sampling.temperature == 0.6
    assert "perhaps \\boxed{8}" in grade.messages[-1]["content"]
    assert "Checked: The final answer is wrong." in grade.messages[-1]["content"]
    assert grade.sampling.temperature == 0.3
    told = rewrite.messages[0]["content"]
    for words in (
        "perhaps \\boxed{8}",
        "a gap",
        "logical coherence 0.30",
        "The final answer is wrong",
    ):
        assert words in told
    assert "correctness 0.90" not in told, "only what is below 0.7"
    for request in asked:
        for message in request.messages:
            shown = message["content"].replace("3+4", "").replace(": 0.0", "")
            assert "7" not in shown, "the reference answer is not told"


@given(data=st.data())
@examples(60)
def test_the_better_version_is_kept(data: st.DataObject) -> None:
    """Against the rule written out: a new version replaces the best one only if its quality is
    higher and no verified answer is lost; rounds end at the threshold.
    """
    tries = data.draw(
        st.lists(st.tuples(st.booleans(), st.integers(0, 20)), min_size=4, max_size=4)
    )
    worth = {}

    def rule(request: Request) -> str:
        if _is_grading(request):
            found = re.search(r"try (\d)", request.messages[-1]["content"])
            assert found is not None
            return _graded(worth[int(found.group(1))])
        number = len(worth)
        is_right, twentieths = tries[number]
        worth[number] = twentieths / 20
        return f"try {number}: \\boxed{{{7 if is_right else 8}}}"

    [record] = good(_pipeline(rule, max_iterations=3), [_RECORD])
    qualities = [n / 20 if ok else min(n / 20, 0.5) for ok, n in tries]
    best, rounds = 0, 0
    while rounds < 3 and qualities[best] < 0.8:
        rounds += 1
        if qualities[rounds] > qualities[best] and (tries[rounds][0] or not tries[best][0]):
            best = rounds
    assert record["iterations"] == rounds
    assert record["reasoning"].startswith(f"try {best}:")
    assert record["quality"] == pytest.approx(qualities[best], abs=1e-4)
    assert [version["round"] for version in record["versions"]] == list(range(rounds + 1))
    assert [version["quality"] for version in record["versions"]] == pytest.approx(
        qualities[: rounds + 1], abs=1e-4
    )


def test_a_malformed_grade_is_null_and_not_0() -> None:
    def rule(request: Request) -> str:
        return (
            '{"correctness": 0.9, "logical_coherence": "good"}'
            if _is_grading(request)
            else "\\boxed{7}"
        )

    [record] = good(_pipeline(rule), [_RECORD])
    assert record["ungraded"] is True
    assert record["quality"] is None
    assert record["scores"] == {**dict.fromkeys(WEIGHTS), "correctness": 0.9}
    assert record["iterations"] == 0, "nothing says that it is bad"


def test_a_wrong_answer_is_rewritten_even_if_nobody_graded_it() -> None:
    def rule(request: Request) -> str:
        if _is_grading(request):
            return "I cannot grade"
        return "\\boxed{7}" if _is_rewriting(request) else "\\boxed{8}"

    [record] = good(_pipeline(rule), [_RECORD])
    assert record["verification"] == "correct"
    assert record["iterations"] == 1


@pytest.mark.parametrize(
    ("text", "reference", "verification", "quality"),
    [
        ("\\boxed{7}", "7", "correct", 1.0),
        ("\\boxed{8}", "7", "wrong", 0.0),
        ("seven", "7", "unparsed", 0.0),
        ("\\boxed{7}", None, "no_reference", None),
    ],
)
def test_grading_can_be_off(
    text: str, reference: str | None, verification: str, quality: float | None
) -> None:
    def rule(request: Request) -> str:
        assert not _is_grading(request)
        return text

    stages = _pipeline(rule, grading="off", max_iterations=0)
    [record] = good(stages, [{**_RECORD, "reference_answer": reference}])
    assert (record["verification"], record["quality"]) == (verification, quality)
    assert record["scores"] is None and record["ungraded"] is False


def test_a_refused_prompt_is_a_reject_and_harms_nobody_else() -> None:
    def rule(request: Request) -> str:
        if _is_grading(request):
            return _graded(1)
        return "" if "long" in request.messages[-1]["content"] else "\\boxed{7}"

    records = [_RECORD, {**_RECORD, "problem": "a long one"}, _RECORD]
    made = drive(_pipeline(rule), records)
    assert [type(record) for record in made] == [dict, Reject, dict]
    assert str(made[1]) == (
        "the engine refused the prompt: the prompt has 9 tokens, and there are 8 positions"
    )


def test_a_broken_engine_is_not_the_records_fault() -> None:
    def rule(request: Request) -> str:
        raise EngineError("gone")

    with pytest.raises(EngineError, match="gone"):
        drive(_pipeline(rule), [_RECORD])
    assert RuleEngine.running == 0


def test_seeds_belong_to_record_stage_and_round() -> None:
    def run(records: list[dict[str, Any]], at_once: int) -> dict[str, set[int]]:
        seeds: dict[str, set[int]] = {}

        def rule(request: Request) -> str:
            name = request.messages[-1]["content"].split("\n")[
                -1 if not _is_grading(request) else 1
            ]
            seeds.setdefault(name, set()).add(request.seed)
            return _graded(0.1) if _is_grading(request) else "\\boxed{0}"

        good(_pipeline(rule, seed=5), records, at_once)
        return seeds

    records = [{"id": n, "problem": f"p{n}", "reference_answer": "1"} for n in range(12)]
    seeds = run(records, 4)
    assert all(len(found) == 6 for found in seeds.values()), "3 solutions and 3 grades"
    assert len(set().union(*seeds.values())) == 6 * 12
    random.Random(0).shuffle(records)
    assert run(records, 1) == seeds
    assert seed_of(5, "3", "generate", 0) in seeds["p3"]
    assert seed_of(5, "3", "improve", 2) in seeds["p3"]


def test_all_stages_share_one_engine() -> None:
    seen: set[int] = set()

    def rule(request: Request) -> str:
        seen.add(RuleEngine.running)
        return _graded(0.2) if _is_grading(request) else "\\boxed{8}"

    good(_pipeline(rule), [_RECORD])
    assert seen == {1}
    assert RuleEngine.running == 0


def test_the_output_is_the_same_byte_for_byte_whatever_runs_beside() -> None:
    def rule(request: Request) -> str:
        value = request.seed % 100 / 100
        return _graded(value) if _is_grading(request) else f"\\boxed{{{request.seed % 3}}}"

    records = [{"id": n, "problem": f"p{n}", "reference_answer": "1"} for n in range(30)]
    runs = [json.dumps(good(_pipeline(rule), records, at_once)) for at_once in (1, 5, 30)]
    assert runs[0] == runs[1] == runs[2]
    assert json.loads(runs[0]) != good(_pipeline(rule, seed=1), records)


def test_timestamps_are_written_on_request() -> None:
    def rule(request: Request) -> str:
        return _graded(1) if _is_grading(request) else "\\boxed{7}"

    [record] = good(_pipeline(rule, timestamps=True), [_RECORD])
    assert list(record) == [*_COLUMNS, "timestamps"]
    stamps = [record["timestamps"][name] for name in ("generated", "evaluated", "improved")]
    assert stamps == sorted(stamps)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", stamp) for stamp in stamps)


def test_evaluate_works_alone_on_solutions_from_elsewhere() -> None:
    stage = Evaluate(grading="off")
    records = [
        {"id": 1, "problem": "3+4", "reference_answer": 7, "reasoning": "so \\boxed{7}", "mine": 1},
        {"id": 2, "problem": "3+4", "reference_answer": "7", "reasoning": "so", "answer": "7.0"},
        {"id": 3, "problem": "3+4", "text": "so"},
    ]
    made = drive([stage], records)
    assert isinstance(made[0], dict) and isinstance(made[1], dict)
    assert made[0]["verification"] == made[1]["verification"] == "correct"
    assert made[0]["mine"] == 1
    assert str(made[2]) == (
        "there is no text in the column 'reasoning'; there are: id, problem, text"
    )


def test_only_accepted_records_can_be_kept() -> None:
    stage = Finish(keep="accepted", quality_threshold=0.4)
    common = {"id": 0, "problem": "p"}
    records: list[dict[str, Any]] = [
        {**common, "quality": 0.4, "verification": "correct"},
        {**common, "quality": 0.45, "verification": "wrong"},
        {**common, "quality": 0.39, "verification": "no_reference"},
        {**common, "quality": None, "verification": "correct"},
    ]
    assert [made is not None for made in stage.process(records)] == [True, False, False, False]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Read(layout="gsm8k"),
        lambda: Generate(engine=EngineSpec(model="m", batch_size=3), seed=4),
        lambda: Evaluate(grading="off"),
        lambda: Improve(quality_threshold=0.3),
        lambda: Finish(keep="accepted"),
    ],
)
def test_a_worker_makes_the_same_stage_from_its_name_and_fields(make: Callable[[], Any]) -> None:
    stage = make()
    spec = spec_of_object(stage)
    sent = dataclasses.replace(spec, values=json.loads(json.dumps(spec.values)))
    assert make_stage(sent, Path.cwd()) == stage
