"""How well a support vector machine reads digits, fold by fold; bad settings need not see all."""

import functools
from typing import Annotated

from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from sklearn.svm import SVC

from muster import Space


@functools.cache
def digits():
    data = load_digits()
    return data.data[:900] / 16, data.target[:900]


def run(
    ctx,
    c: Annotated[float, Space.log(1e-2, 1e3)] = 1.0,
    gamma: Annotated[float, Space.log(1e-4, 10)] = 0.1,
    kernel: Annotated[str, Space.choice("rbf", "poly", "sigmoid")] = "rbf",
):
    x, y = digits()
    state = ctx.restore() or {"right": []}
    folds = list(StratifiedKFold(9, shuffle=True, random_state=0).split(x, y))
    for fold in range(len(state["right"]), 9):
        known, new = folds[fold]
        model = SVC(C=c, gamma=gamma, kernel=kernel).fit(x[known], y[known])
        state["right"].append(float(model.score(x[new], y[new])))
        ctx.log(fold + 1, accuracy=sum(state["right"]) / len(state["right"]))
        ctx.checkpoint(state)
    return {"accuracy": sum(state["right"]) / 9}
