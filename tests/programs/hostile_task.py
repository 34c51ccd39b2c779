"""Puts the text that it is given everywhere where a task can put one."""

from __future__ import annotations

from typing import Any

import muster


def task(text: str, fails: bool, ctx: muster.Context) -> dict[str, Any]:
    print(text)
    ctx.logger.info("%s", text)
    ctx.report(text)
    ctx.report(0.5, text)
    if fails:
        raise ValueError(text)
    return {"text": text, f"key {text[:100]}": 1, "list": [text]}
