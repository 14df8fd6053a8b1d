"""The checks of the self-test, in the order in which they run, and what a check finds.

Imports nothing that needs mlx: a check's function is looked up in the process that runs it.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

# "failed": a guarantee does not hold here; "crashed" and "hung": the check's process did; "skipped": the check does not
# apply to this device.
Status = Literal["passed", "failed", "crashed", "hung", "skipped"]

FAILURES: tuple[Status, ...] = ("failed", "crashed", "hung")

# Makes float32 really float32: on CUDA and on Apple's M5 it is TF32 otherwise.
EXACT = {"MLX_ENABLE_TF32": "0"}


@attrs.frozen
class Check:
    """One check: the function `name` of a module.

    Attributes:
        meaning: what it means for a user if the check fails. (If it crashes or hangs, nothing was found out.)
    """

    name: str
    module: str
    meaning: str
    timeout_s: float = 600.0  # seconds after which its process counts as hung, beyond the time that the check is given
    environment: dict[str, str] = attrs.field(factory=dict)  # variables of its process
    of_bundled_pair: bool = False  # whether it checks the bundled pair although the user has given another

    @property
    def label(self) -> str:
        """The check's name for people, with the variables that set it apart from another of the same function."""
        whose = " of the bundled pair" if self.of_bundled_pair else ""
        return self.name.replace("_", " ") + whose + (f" with {self.variables}" if self.variables else "")

    @property
    def variables(self) -> str:
        """The variables that set it apart from another check of the same function; "" for none."""
        return " ".join(f"{name}={value}" for name, value in self.environment.items() if name not in EXACT)


@attrs.frozen
class Finding:
    """The result of one check: one sentence, without paths and prompts, and what was measured, as JSON values."""

    status: Status
    summary: str
    figures: dict[str, Any] = attrs.field(factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The finding as a JSON object."""
        return attrs.asdict(self)


def passed_if(is_right: bool, right: str, wrong: str, **figures: Any) -> Finding:
    """A finding of a check that passes or fails."""
    return Finding("passed" if is_right else "failed", right if is_right else wrong, figures)


def _check(module: str, name: str, meaning: str, **options: Any) -> Check:
    return Check(name, f"runtime.selftest.{module}", meaning, **options)


CHECKS = (
    # A download may take long.
    _check("speed", "models", "the models are too large for this device, and it will swap", timeout_s=3600.0),
    _check(
        "exactness",
        "greedy_equality",
        "greedy text with a drafter is not the target's own: a bug of Outrider's, or of MLX on this device",
        environment=EXACT,
    ),
    _check(
        "exactness",
        "seeded_equality",
        "a seed does not give the same text each time: do not rely on seeds on this device",
        environment=EXACT,
    ),
    _check(
        "exactness",
        "concurrent_logits",
        "two threads that compute at the same time disturb each other: results may be wrong without an error",
    ),
    _check("exactness", "noise", "sampled texts with a drafter differ from those without, and are less often accepted"),
    _check("exactness", "not_a_number", "damaged weights or overflows may give nonsense in place of an error"),
    _check(
        "exactness",
        "kernels",
        "families that are named give other texts than mlx-lm's, or none, on this device",
        environment=EXACT,
    ),
    _check(
        "exactness",
        "rows",
        "texts that share passes are not what each is alone, or cannot share any: use max_batch=1 on this device",
        environment=EXACT,
    ),
    _check("stability", "streams", "long-running services lose memory or their drafter on this device"),
    _check("stability", "opening", "a runtime cannot be opened again and again in one process"),
    _check("stability", "failures", "a failing model may take the process with it, or change texts"),
    _check("stability", "device_isolation", "the runtime disturbs what your own code computes with MLX beside it"),
    _check("stability", "failing_allocation", "a stream that runs out of memory ends the others, too"),
    _check("speed", "prices", "forward passes could not be timed"),
    _check("speed", "python", "what Python takes of a pass could not be timed"),
    _check("speed", "overlap", "two models at a time could not be timed"),
    _check("speed", "shape", "a pair with the cost of a real one could not be measured"),
    _check("speed", "many_streams", "tokens per second of several streams could not be measured"),
    _check("speed", "speeds", "tokens per second could not be measured"),
)

# The checks that matter most, in the order in which they run where there is little time.
QUICK = ("prices", "speeds", "many_streams", "python", "greedy_equality", "rows")

# The speeds of the bundled pair, beside those of the user's own.
OF_THE_BUNDLED_PAIR = attrs.evolve(CHECKS[-1], of_bundled_pair=True)

# The speeds again, with each way to evaluate layers.
CHECKS_OF_LAYERS = tuple(
    attrs.evolve(CHECKS[-1], environment={"OUTRIDER_LAYER_EVALUATION": value})
    for value in ("whole", "waiting", "pipelined")
)

# The speeds again, with other sizes of MLX's command buffers, which only GPUs have.
CHECKS_OF_BUFFERS = tuple(
    attrs.evolve(CHECKS[-1], environment=environment)
    for environment in (
        {"OUTRIDER_TUNE_MLX": "0"},
        {"MLX_MAX_OPS_PER_BUFFER": "200", "MLX_MAX_MB_PER_BUFFER": "200"},
        {"MLX_MAX_OPS_PER_BUFFER": "4000", "MLX_MAX_MB_PER_BUFFER": "8000"},
        {"OUTRIDER_LAYER_EVALUATION": "pipelined", "OUTRIDER_TUNE_MLX": "0"},
    )
)
