"""Sentences in four made-up tongues, as JSON lines on standard output."""

import json
import random

TONGUES = {
    "low": "wir ihr nord see wind schiff hafen deich watt ebbe flut grau",
    "high": "lago monte sole vino canto donna piazza bella notte stella",
    "far": "kumo yama sakura hoshi kaze umi tori hana mizu tsuki",
    "old": "rex lex pax urbs mons fons pons dens mens gens",
}
random.seed(0)
for n in range(400):
    tongue = random.choice(list(TONGUES))
    text = " ".join(random.choices(TONGUES[tongue].split(), k=8))
    print(json.dumps({"id": n, "tongue": tongue, "text": text}))
