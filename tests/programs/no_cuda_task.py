"""A task whose torch sees no GPU: it would compute on the CPU, and nobody would know."""

import pretend_gpu

pretend_gpu.pretend_torch(works=False)


def work(i: int):
    return {"device": "cpu"}
