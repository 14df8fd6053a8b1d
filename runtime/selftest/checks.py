"""The checks of the self-test, in the order in which they run.

Imports nothing that needs mlx: a check's function is looked up in the process that runs it.
"""

from __future__ import annotations

import attrs

# Float32 is float32: on CUDA and on Apple's M5 it is TF32 otherwise.
EXACT = {"MLX_ENABLE_TF32": "0"}


@attrs.frozen
class Check:
    """One check.

    Attributes:
        name: of the function, in `module`.
        module: full name of the module.
        meaning: what it means for a user if the check fails. (If it crashes or hangs, nothing was found out.)
        timeout_s: seconds after which its process counts as hung, beyond the time that the check is given.
        environment: variables of its process.
    """

    name: str
    module: str
    meaning: str
    timeout_s: float = 600.0
    environment: dict[str, str] = attrs.field(factory=dict)

    @property
    def label(self) -> str:
        """The check's name for people, with the variables that set it apart from another of the same function."""
        return self.name.replace("_", " ") + (f" with {self.variables}" if self.variables else "")

    @property
    def variables(self) -> str:
        """The variables that set it apart from another check of the same function; "" for none."""
        return " ".join(f"{name}={value}" for name, value in self.environment.items() if name not in EXACT)


CHECKS = (
    # A download may take long.
    Check("models", "runtime.selftest.speed", "the models are too large for this device, and it will swap", 3600.0),
    Check(
        "greedy_equality",
        "runtime.selftest.exactness",
        "greedy text with a drafter is not the target's own: a bug of Outrider's, or of MLX on this device",
        environment=EXACT,
    ),
    Check(
        "seeded_equality",
        "runtime.selftest.exactness",
        "a seed does not give the same text each time: do not rely on seeds on this device",
        environment=EXACT,
    ),
    Check(
        "concurrent_logits",
        "runtime.selftest.exactness",
        "two threads that compute at the same time disturb each other: results may be wrong without an error",
    ),
    Check(
        "noise",
        "runtime.selftest.exactness",
        "sampled texts with a drafter differ from those without, and are less often accepted",
    ),
    Check(
        "not_a_number",
        "runtime.selftest.exactness",
        "damaged weights or overflows may give nonsense in place of an error",
    ),
    Check(
        "kernels",
        "runtime.selftest.exactness",
        "families that are named give other texts than mlx-lm's, or none, on this device",
        environment=EXACT,
    ),
    Check(
        "rows",
        "runtime.selftest.exactness",
        "texts that share passes are not what each is alone, or cannot share any: use max_batch=1 on this device",
        environment=EXACT,
    ),
    Check("streams", "runtime.selftest.stability", "long-running services lose memory or their drafter on this device"),
    Check("opening", "runtime.selftest.stability", "a runtime cannot be opened again and again in one process"),
    Check("failures", "runtime.selftest.stability", "a failing model may take the process with it, or change texts"),
    Check(
        "device_isolation",
        "runtime.selftest.stability",
        "the runtime disturbs what your own code computes with MLX beside it",
    ),
    Check("failing_allocation", "runtime.selftest.stability", "a stream that runs out of memory ends the others, too"),
    Check("prices", "runtime.selftest.speed", "forward passes could not be timed"),
    Check("overlap", "runtime.selftest.speed", "two models at a time could not be timed"),
    Check(
        "switch_intervals", "runtime.selftest.speed", "the effect of the GIL's switch interval could not be measured"
    ),
    Check("speeds", "runtime.selftest.speed", "tokens per second could not be measured"),
)

# The speeds again, with layers evaluated otherwise.
CHECKS_OF_LAYERS = tuple(
    attrs.evolve(CHECKS[-1], environment={"OUTRIDER_LAYER_EVALUATION": value})
    for value in ("whole", "waiting", "pipelined")
)

# And with other sizes of MLX's buffers, which only GPUs have.
CHECKS_OF_BUFFERS = tuple(
    attrs.evolve(CHECKS[-1], environment=environment)
    for environment in (
        {"OUTRIDER_TUNE_MLX": "0"},
        {"MLX_MAX_OPS_PER_BUFFER": "200", "MLX_MAX_MB_PER_BUFFER": "200"},
        {"MLX_MAX_OPS_PER_BUFFER": "4000", "MLX_MAX_MB_PER_BUFFER": "8000"},
        {"OUTRIDER_LAYER_EVALUATION": "pipelined", "OUTRIDER_TUNE_MLX": "0"},
    )
)
