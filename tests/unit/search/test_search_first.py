"""A first look: a search proposes, hears, ends, and is rebuilt by replaying."""

from muster.search.records import Ended, Ending, Heard, Point
from muster.search.search import Search
from muster.search.space import Space
from muster.search.spec import Budget, SearchSpec, objectives


def test_first():
    space = Space.from_texts(
        ["lr=log(1e-5,1e-1)", "opt=choice(adam,sgd)", "momentum=uniform(0,0.99) if opt=sgd"]
    )
    spec = SearchSpec(
        space=space,
        objectives=objectives(maximize=["accuracy"]),
        budget=Budget(trials=5),
        seeds=(0, 1),
        tries=({"lr": 1e-3},),
    )
    assert SearchSpec.from_json(spec.to_json()) == spec
    search = Search(spec)
    records = []
    for i in range(10):
        [p] = search.ask(1)
        records.append(p)
        heard = Heard(p.trial, p.seed, (Point("accuracy", 1, i),))
        search.heard(p.trial, p.seed, heard.points)
        records.append(heard)
        e = Ended(p.trial, p.seed, Ending("done", {"accuracy": float(i)}))
        search.ended(p.trial, p.seed, e.ending)
        records.append(e)
        again = Search.replay(spec, records)
        assert again.ask(2) == Search.replay(spec, records).ask(2)
        assert again.trials[: len(search.trials)] == again.trials[: len(search.trials)]
    assert search.ask(1) == [] and search.is_exhausted()
    assert search.best(2)[0].values == (8.5,)
    print(search.best(5))
