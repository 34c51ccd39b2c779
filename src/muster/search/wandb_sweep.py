"""The sweep file of Weights & Biases as a space and a specification.

What a file asks for and this search cannot do is refused by name. What matters to W&B alone
(``project``, ``entity`` and the like) is left out, and the remarks name it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from muster.base.errors import UnknownNameError, UsageError, check_parameter_name
from muster.search.distributions import Choice, Distribution, Float, Int
from muster.search.names import Direction, SamplerName
from muster.search.space import Axis, Space
from muster.search.spec import Budget, Objective, SearchSpec, Stopping

_OWN_WORLD = ("name", "description", "project", "entity", "job", "controller")
_KNOWN = ("method", "metric", "parameters", "early_terminate", "run_cap", "program", "command",
          *_OWN_WORLD)  # fmt: skip
_ONE_PARAMETER = ("value", "values", "min", "max", "q", "mu", "sigma", "distribution",
                  "probabilities", "parameters")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What a sweep file says."""

    spec: SearchSpec
    fixed: Mapping[str, Any]
    """Parameters with one value; they are not part of the space."""
    program: str | None
    remarks: tuple[str, ...]
    """What differs from W&B, a sentence for each difference."""


def import_sweep(sweep: Mapping[str, Any]) -> Imported:
    """The search that a sweep file, read from YAML, describes.

    UsageError, or UnknownNameError for a key that W&B does not have either, for what cannot be
    taken over.
    """
    for key in sweep:
        if key not in _KNOWN:
            raise UnknownNameError("key of the sweep file", str(key), _KNOWN)
    remarks: list[str] = []
    left_out = [key for key in _OWN_WORLD if key in sweep]
    if left_out:
        remarks.append(f"Left out: {', '.join(left_out)}.")
    axes, fixed = _parameters(sweep.get("parameters"))
    sampler = _method(sweep.get("method"), axes, remarks)
    if not axes:
        raise UsageError("The sweep file varies nothing: each parameter has one value.")
    space = Space(tuple(axes))
    cap = sweep.get("run_cap")
    trials = None if cap is None else _whole("the sweep file", "run_cap", cap)
    if sweep["method"] == "grid":
        trials = space.size if trials is None else min(trials, space.size or trials)
    spec = SearchSpec(
        space=space,
        objectives=(_metric(sweep.get("metric"), remarks),),
        sampler=sampler,
        budget=Budget(trials=trials),
        stopping=_early(sweep.get("early_terminate"), remarks),
    )
    program = sweep.get("program")
    return Imported(spec=spec, fixed=fixed, program=program, remarks=tuple(remarks))


def _method(method: Any, axes: list[Axis], remarks: list[str]) -> SamplerName:
    if method == "random":
        return "random"
    if method == "bayes":
        remarks.append("method: bayes is a Gaussian process; here it is --sampler gp.")
        return "gp"
    if method == "grid":
        for axis in axes:
            if axis.distribution.size is None:
                raise UsageError(
                    f"method: grid needs values, but {axis.name} is {axis.to_text()}.",
                    hint="list its values, or give it a q.",
                )
        remarks.append("method: grid tries every setting, here in random order.")
        return "random"
    raise UnknownNameError("method of the sweep file", str(method), ("bayes", "grid", "random"))


def _metric(metric: Any, remarks: list[str]) -> Objective:
    if not isinstance(metric, Mapping) or "name" not in metric:
        raise UsageError(
            "The sweep file has no metric with a name, so there is no goal.",
            hint="metric: {name: loss, goal: minimize}",
        )
    for key in metric:
        if key not in ("name", "goal", "target"):
            raise UnknownNameError("key of the metric", str(key), ("name", "goal", "target"))
    if "target" in metric:
        remarks.append(
            f"metric: target {metric['target']} is left out; the search does not end there."
        )
    goal: Direction = metric.get("goal", "minimize")
    if goal not in ("minimize", "maximize"):
        raise UnknownNameError("goal of the metric", str(goal), ("minimize", "maximize"))
    return Objective(str(metric["name"]), goal)


def _early(early: Any, remarks: list[str]) -> Stopping:
    """W&B's ``hyperband`` ends runs at once and never waits: that is ``asha-stop`` here."""
    if early is None:
        return Stopping()
    if not isinstance(early, Mapping):
        raise UsageError(
            f"early_terminate is {early!r}.", hint="early_terminate: {type: hyperband, min_iter: 3}"
        )
    known = ("type", "min_iter", "max_iter", "s", "eta", "strict")
    for key in early:
        if key not in known:
            raise UnknownNameError("key of early_terminate", str(key), known)
    if early.get("type") != "hyperband":
        raise UnknownNameError("type of early_terminate", str(early.get("type")), ("hyperband",))
    eta = _whole("early_terminate", "eta", early.get("eta", 3), least=2)
    if "min_iter" in early:
        first, last = _number("early_terminate", "min_iter", early["min_iter"]), None
    elif "max_iter" in early:
        last = _number("early_terminate", "max_iter", early["max_iter"])
        first = last / eta ** _whole("early_terminate", "s", early.get("s", 1), least=0)
        remarks.append(
            f"early_terminate: here a trial is whole at max_iter, and one that logs beyond step "
            f"{last:g} is ended there, while W&B lets it go on; name min_iter instead for that."
        )
    else:
        raise UsageError(
            "early_terminate names neither min_iter nor max_iter.",
            hint="min_iter is the step of the first rung.",
        )
    if "strict" in early:
        remarks.append("early_terminate: strict is left out; here one trial in eta goes on.")
    remarks.append(
        "early_terminate: hyperband is --stop asha-stop here; its steps are the logged ones, "
        "while W&B counts calls of wandb.log."
    )
    return Stopping(rule="asha-stop", min_step=first, max_step=last, eta=eta)


def _parameters(parameters: Any) -> tuple[list[Axis], dict[str, Any]]:
    if not isinstance(parameters, Mapping) or not parameters:
        raise UsageError("The sweep file has no parameters.")
    axes: list[Axis] = []
    fixed: dict[str, Any] = {}
    for name, given in parameters.items():
        if not isinstance(given, Mapping):
            raise UsageError(f"Parameter {name} is {given!r}.", hint=f"{name}: {{value: {given}}}")
        for word in given:
            if word not in _ONE_PARAMETER:
                raise UnknownNameError(f"key of parameter {name}", str(word), _ONE_PARAMETER)
        if "parameters" in given:
            raise UsageError(
                f"Parameter {name} has parameters of its own, which a task here cannot have.",
                hint=f"write them side by side, as {name}_NAME.",
            )
        _expect_nothing_beside(name, given)
        if "value" in given or given.get("distribution") == "constant":
            fixed[name] = given.get("value")
        elif "values" in given and not isinstance(given["values"], list):
            raise UsageError(f"values of {name} is {given['values']!r}, which is not a list.")
        elif len(given.get("values", ())) == 1:
            fixed[name] = given["values"][0]
        else:
            axes.append(Axis(checked_name(name), _distribution(name, given)))
    return axes, fixed


def _expect_nothing_beside(name: str, given: Mapping[str, Any]) -> None:
    """UsageError for what says something else of a parameter whose values are listed."""
    listed = next((word for word in ("value", "values") if word in given), None)
    if listed is None:
        return
    forms = ("constant",) if listed == "value" else ("categorical", "categorical_w_probabilities")
    for word, meant in given.items():
        is_known = word == listed or (word == "probabilities" and listed == "values")
        if not is_known and not (word == "distribution" and meant in forms):
            shown = f"{word}: {meant}" if word == "distribution" else word
            raise UsageError(
                f"Parameter {name} has {shown} beside {listed}, where it means nothing.",
                hint=f"leave out {word}, or {listed}.",
            )


def checked_name(name: Any) -> str:
    """``name`` as a text; UsageError where no parameter can have it."""
    check_parameter_name(str(name))
    return str(name)


def _distribution(name: str, given: Mapping[str, Any]) -> Distribution:
    if "values" in given:
        if "probabilities" in given:
            raise UsageError(
                f"Parameter {name} has probabilities, which the samplers here do not know.",
                hint="leave them out: then all values are equally likely.",
            )
        return Choice(tuple(given["values"]))
    form = given.get("distribution")
    if "min" not in given or "max" not in given:
        if form in ("normal", "log_normal", "q_normal", "q_log_normal"):
            raise UsageError(
                f"Parameter {name} has the distribution {form}, which has no bounds.",
                hint="give it min and max, and uniform or log_uniform_values.",
            )
        raise UsageError(f"Parameter {name} has neither value, values, nor min and max.")
    low, high = (_number(name, end, given[end]) for end in ("min", "max"))
    if form is None and "q" in given:
        form = "q_uniform"
    elif form is None:
        form = "int_uniform" if isinstance(low, int) and isinstance(high, int) else "uniform"
    for word in ("mu", "sigma", "probabilities", "q"):
        if word in given and not (word == "q" and str(form).startswith("q_")):
            raise UsageError(
                f"Parameter {name} has {word}, which means nothing to {form} from min to max.",
                hint=f"leave {word} out" + (", or write q_uniform." if word == "q" else "."),
            )
    step = _number(name, "q", given.get("q", 1))
    match form:
        case "int_uniform":
            return Int(_whole(name, "min", low), _whole(name, "max", high))
        case "uniform":
            return Float(float(low), float(high))
        case "q_uniform":
            if all(float(end).is_integer() for end in (low, high, step)):
                return Int(int(low), int(high), step=int(step))
            return Float(float(low), float(high), step=float(step))
        case "log_uniform_values" | "inv_log_uniform_values":  # 1 / x is log uniform as x is
            return Float(float(low), float(high), log=True)
        case "log_uniform":
            return Float(_exp(name, low), _exp(name, high), log=True)
        case "inv_log_uniform":
            return Float(_exp(name, -high), _exp(name, -low), log=True)
        case "q_log_uniform_values" if step == 1:
            return Int(_whole(name, "min", low), _whole(name, "max", high), log=True)
    known = ("int_uniform", "uniform", "q_uniform", "log_uniform_values", "log_uniform",
             "constant", "categorical")  # fmt: skip
    raise UnknownNameError(f"distribution of {name}", str(form), known)


def _number(name: str, key: str, value: Any) -> int | float:
    """``value`` as a finite number: YAML reads 1e-5, which has no point, as a text."""
    found = value
    if isinstance(value, str):
        with suppress(ValueError):
            found = float(value)
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise UsageError(f"{key} of {name} is {value!r}, which is not a number.")
    return found


def _whole(name: str, key: str, value: Any, *, least: float = -math.inf) -> int:
    number = _number(name, key, value)
    if not float(number).is_integer() or number < least:
        more = f" from {least:g} on" if least > -math.inf else ""
        raise UsageError(f"{key} of {name} is {value!r}, which is not a whole number{more}.")
    return int(number)


def _exp(name: str, power: float) -> float:
    try:
        return math.exp(power)
    except OverflowError:
        raise UsageError(
            f"Parameter {name} goes up to e to the power of {power:g}, more than a float holds.",
            hint="log_uniform_values takes min and max as they are.",
        ) from None
