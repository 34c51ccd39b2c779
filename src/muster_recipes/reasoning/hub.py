"""``--force-download``: fetch data set and model again, before anything is opened."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from muster import MissingPackageError, SetupError
from muster.generation import is_hub_reachable
from muster_recipes.reasoning.config import ReasoningConfig
from muster_recipes.reasoning.sources import DATA_SETS, HUB, source_of


def refresh(config: ReasoningConfig) -> list[str]:
    """Renew the hub's cache on this machine; returns sentences on what was fetched and not.

    Raises SetupError when a package is missing or the hub cannot be reached.
    """
    return [_refresh_data(config), _refresh_model(config)]


def _refresh_data(config: ReasoningConfig) -> str:
    item = DATA_SETS.get(config.dataset)
    if item is not None and item.joins_configs and not config.dataset_config:
        name, configs = item.hub, list(item.configs)
    else:
        source = source_of(config)
        if not source.text.startswith(HUB):
            return f"Nothing to fetch for the data set {config.dataset}: it is on this machine."
        name, configs = source.text.removeprefix(HUB), [source.config]
    _need("datasets", "datasets")
    import datasets  # type: ignore[import-untyped]

    if not Path(name).exists():
        _need_hub(f"the data set {name}")
    again = datasets.DownloadMode.FORCE_REDOWNLOAD
    for one in configs:
        try:
            builder = datasets.load_dataset_builder(name, one or None, download_mode=again)
            builder.download_and_prepare(download_mode=again)
        except (OSError, ValueError) as error:
            raise SetupError(
                f"Cannot fetch the data set {name}: {error}",
                hint="check the network; without --force-download the cached copy is used.",
            ) from error
    return f"Fetched the data set {name} again."


def _refresh_model(config: ReasoningConfig) -> str:
    name = config.model_name
    if config.engine == "openai":
        return f"Nothing to fetch for the model {name}: the server has it."
    if Path(name).exists():
        return f"Nothing to fetch for the model {name}: it is a folder on this machine."
    _need("huggingface_hub", "transformers")
    import huggingface_hub

    _need_hub(f"the model {name}")
    try:
        huggingface_hub.snapshot_download(name, force_download=True)
    except (OSError, ValueError) as error:
        raise SetupError(
            f"Cannot fetch the model {name}: {error}",
            hint="check the name and the network; without --force-download the cache is used.",
        ) from error
    return f"Fetched the model {name} again."


def _need(package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError("--force-download", package, extra)


def _need_hub(what: str) -> None:
    """Raise SetupError without the hub: the libraries would silently take the cached copy."""
    if not is_hub_reachable():
        raise SetupError(
            f"Cannot fetch {what}: the Hugging Face hub cannot be reached.",
            hint="check the network; without --force-download the cached copy is used.",
        )
