"""The flags of the recipe ``reasoning`` and what they mean for its stages. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from muster import UsageError
from muster.generation import EngineSpec, Sampling, check_engine
from muster_recipes.refusals import flag_of, require_default, require_one_or_more

#: The model that ships with muster: it solves the problems of the data set ``arith`` only.
ARITH_MODEL = Path(__file__).parent.parent / "arith" / "weights"
#: For all other data sets: small, free to use, follows instructions, 32,768 positions.
HUB_MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
#: Engines of other packages are given all flags.
_OURS = ("transformers", "vllm", "openai")
#: Flags that have no effect with some of these; they are refused there.
_ONLY_FOR: Mapping[str, tuple[str, ...]] = {
    "base_url": ("openai",),
    "api_key_env": ("openai",),
    "concurrency": ("openai",),
    "requests_per_minute": ("openai",),
    "tokens_per_minute": ("openai",),
    "batch_size": ("transformers",),
    "quantize": ("transformers",),
    "compile": ("transformers",),
    "dtype": ("transformers", "vllm"),
    "tensor_parallel": ("vllm",),
}
_MAX_TOKENS = 4096
_MAX_TOKENS_LOW_MEMORY = 2048


@dataclass(frozen=True, kw_only=True)
class ReasoningConfig:
    """Generate solutions, verify and grade them, improve the weak ones."""

    list_datasets: bool = False
    """Show the data sets that are known by a short name, and do nothing else."""
    dataset_info: str = ""
    """Show what is known of one of them, and do nothing else."""
    dataset: str = "arith"
    """A key of --list-datasets, a Hugging Face name (owner/name), or a JSONL, Parquet or CSV path.
    The default needs no network: arithmetic made by the arith generator."""
    problem_column: str = ""
    """Column with the problem; needed where it is not called "problem"."""
    answer_column: str = ""
    """Column with the reference answer, or with a solution that ends in it."""
    dataset_config: str = ""
    """Configuration of a Hugging Face data set, such as a subject of math."""
    split: str = ""
    """Split of a Hugging Face data set; the table's default without it."""
    difficulty: int = 3
    """Operations per problem (arith only)."""
    num_problems: int = 10_000
    """Problems that are made (arith only); --limit and --skip choose among them."""
    engine: str = "transformers"
    """What generates text: transformers, vllm, openai, or an engine of an installed package."""
    model: str = ""
    """A Hugging Face name or folder, or the model's name on the server. Without it: the model that
    ships with muster for arith, Qwen/Qwen2.5-1.5B-Instruct for other data sets."""
    base_url: str = ""
    """Address of an OpenAI-compatible server."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the server's key."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights."""
    quantize: Literal["none", "8bit", "4bit"] = "none"
    """Smaller weights through bitsandbytes (CUDA only)."""
    batch_size: int = 0
    """Prompts per batch at the start; 0: the engine's own choice."""
    concurrency: int = 0
    """Requests in flight to a server; 0: the engine's own choice."""
    requests_per_minute: int = 0
    """The server's limit; 0: none."""
    tokens_per_minute: int = 0
    """The server's limit; 0: none."""
    tensor_parallel: int = 1
    """GPUs per engine (vllm only)."""
    compile: bool = False
    """Compile the model where the engine can."""
    temperature: float = 0.6
    """Temperature of solutions."""
    top_p: float = 0.95
    """Solutions and grades are drawn from the likeliest tokens that hold this probability."""
    max_tokens: int | None = None
    """Longest answer of the model; 4096, with --low-memory 2048."""
    grading: Literal["auto", "model", "off"] = "auto"
    """off: quality is 1 for a verified answer, 0 for a wrong one or none, and null without
    reference. auto: off for the model that ships with muster, which cannot grade, else model."""
    eval_temperature: float = 0.3
    """Temperature of grades."""
    quality_threshold: float = 0.8
    """Solutions below are rewritten; at or above they count as accepted."""
    max_iterations: int = 2
    """Rounds of rewriting; 0: none."""
    keep: Literal["all", "accepted"] = "all"
    """Which records the output holds."""
    seed: int = 0
    """All samples derive from it and from the record's id."""
    timestamps: bool = False
    """Write when each stage was done. The output then differs from run to run."""
    low_memory: bool = False
    """Batch 1 at the start, at most 2048 new tokens, 8-bit weights where CUDA and bitsandbytes are
    there."""
    optimize_gpu: bool = False
    """Allow TF32 and let cuDNN choose its algorithms by timing; what was set is logged."""
    no_warnings: bool = False
    """Quiet warnings of third parties; those of muster stay."""
    force_download: bool = False
    """Fetch data set and model from the hub again."""
    cleanup_delay: float = 0.0
    """Accepted and without effect: sleeping frees no memory."""

    def check(self) -> None:
        """Raise UsageError for values that make no sense."""
        require_one_or_more(self, "num_problems", "max_tokens")
        for name in ("batch_size", "concurrency", "max_iterations", "cleanup_delay",
                     "requests_per_minute", "tokens_per_minute"):  # fmt: skip
            if getattr(self, name) < 0:
                raise UsageError(f"{flag_of(name)} {getattr(self, name)} is below 0.")
        for name in ("temperature", "eval_temperature"):
            if not 0 <= getattr(self, name) <= 2:
                raise UsageError(
                    f"{flag_of(name)} {getattr(self, name)} is not from 0 (greedy) to 2."
                )
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p {self.top_p} is not above 0 and at most 1.")
        if not 0 <= self.quality_threshold <= 1:
            raise UsageError(f"--quality-threshold {self.quality_threshold} is not from 0 to 1.")
        if self.tensor_parallel < 1:
            raise UsageError(f"--tensor-parallel {self.tensor_parallel} is below 1.")
        self._check_engine()

    def check_new(self) -> None:
        """Raise UsageError for a flag without effect, which an older run may have."""
        if not self.is_graded:
            hint = "leave it out, or add --grading model."
            require_default(self, ["eval_temperature"], "without grading", hint)
        is_drawn = self.temperature > 0 or (self.is_graded and self.eval_temperature > 0)
        if self.engine in _OURS and not is_drawn:
            require_default(self, ["top_p"], "with --temperature 0")
        if self.engine == "openai":
            require_default(self, ["optimize_gpu"], "with --engine openai")

    def _check_engine(self) -> None:
        check_engine(self.engine)
        if not self.model and self.engine == "openai":
            raise UsageError(
                "--engine openai needs the model's name on the server.",
                hint="--model NAME, one of those that the server lists under /v1/models.",
            )
        if self.engine == "openai" and not self.base_url:
            raise UsageError(
                "--engine openai needs the address of a server.",
                hint="--base-url http://127.0.0.1:8000/v1",
            )
        for name, engines in _ONLY_FOR.items():
            if self.engine in _OURS and self.engine not in engines:
                hint = f"leave it out; it is for --engine {' and '.join(engines)}."
                require_default(self, [name], f"with --engine {self.engine}", hint)

    @property
    def model_name(self) -> str:
        """The model that is used."""
        if self.model or self.engine == "openai":
            return self.model
        return str(ARITH_MODEL) if self.dataset == "arith" else HUB_MODEL

    @property
    def is_graded(self) -> bool:
        """Whether the model is asked for grades."""
        if self.grading == "auto":
            return self.model_name != str(ARITH_MODEL)
        return self.grading == "model"

    @property
    def engine_spec(self) -> EngineSpec:
        """The same for all stages, so that they share one engine."""
        options = {name: getattr(self, name) for name in _ONLY_FOR}
        options["batch_size"] = self.batch_size or int(self.low_memory)
        return EngineSpec(engine=self.engine, model=self.model_name, **options)

    @property
    def sampling(self) -> Sampling:
        default = _MAX_TOKENS_LOW_MEMORY if self.low_memory else _MAX_TOKENS
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens or default,
        )
