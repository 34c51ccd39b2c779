"""Is the Hugging Face hub within reach? Its libraries find out slowly, again for every file."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

_LIMIT_S = 3.0
_PAUSE_S = 1.0
#: What says that there is no way to the hub, by any HTTP library; others are answers or hiccups.
_NO_WAY = {"ConnectError", "ConnectTimeout", "ConnectionError", "ProxyError", "SSLError"}


def use_cache_if_unreachable() -> None:
    """Without a connection, let this process take what is in the cache and nothing else.

    The libraries try each file six times otherwise, half a minute long and with a line each.
    """
    try:
        # Names, because the package is optional and its types change from version to version.
        hub: Any = importlib.import_module("huggingface_hub")
        utils: Any = importlib.import_module("huggingface_hub.utils")
    except ImportError:
        return  # who needs it says so
    if _answers(hub, utils):
        return
    time.sleep(_PAUSE_S)  # a name server that was busy for a moment
    if _answers(hub, utils):
        return
    hub.constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:  # it has made a copy
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True


def _answers(hub: Any, utils: Any) -> bool:
    try:
        utils.get_session().head(hub.constants.ENDPOINT, timeout=_LIMIT_S)
    except Exception as error:  # each version has its own HTTP library
        return type(error).__name__ not in _NO_WAY
    return True
