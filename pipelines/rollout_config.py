"""How a model rolls out: a small frozen config, kept in the pipeline's folder, and the presets people name."""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class RolloutConfig:
    """The rollout a checkpoint was trained for. All frames are latent frames.

    Args:
        chunk_frames: frames generated together.
        window_frames: finished frames before a causal block's own start that it still sees, besides the sink and
            its own frames. (Self-Forcing's `local_attn_size` counts sink and chunk too: window_frames =
            local_attn_size - sink - chunk.)
        sink_frames: first frames of the video that are never forgotten.
        denoising_sigmas: noise levels of the denoising passes before `shift`, the first is 1.
        first_chunk_sigmas: the same for chunk 0, where a model has its own.
        shift: the flow-matching time shift, sigma = shift * s / (1 + (shift - 1) * s).
        context_noise: the timestep (0 to 1000) of the clean pass that writes history.
        clean_block_frames: frames of a causal block in the clean pass; `None`: the whole chunk (published chunk-wise
            checkpoints), 1: frame-causal.
        rope_mode: `"absolute"`, rotary positions count from the first frame of the video.
        max_sequence_length: the most text tokens of a prompt.
        default_height, default_width, default_fps: the video the model was trained for, in pixels and frames a second.
    """

    chunk_frames: int = 3
    window_frames: int = 18
    sink_frames: int = 0
    denoising_sigmas: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25)
    first_chunk_sigmas: tuple[float, ...] | None = None
    shift: float = 5.0
    context_noise: float = 0.0
    clean_block_frames: int | None = None
    rope_mode: str = "absolute"
    max_sequence_length: int = 512
    default_height: int = 480
    default_width: int = 832
    default_fps: int = 16

    def __post_init__(self):
        for name, least in (("chunk_frames", 1), ("window_frames", 0), ("sink_frames", 0), ("max_sequence_length", 1),
                            ("default_height", 1), ("default_width", 1), ("default_fps", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        block = self.clean_block_frames
        if block is not None and (not isinstance(block, int) or not 1 <= block <= self.chunk_frames):
            raise ValueError(f"clean_block_frames must be between 1 and chunk_frames {self.chunk_frames}, or None for "
                             f"the whole chunk; got {block!r}")
        for name in ("denoising_sigmas", "first_chunk_sigmas"):
            sigmas = getattr(self, name)
            if sigmas is None and name == "first_chunk_sigmas":
                continue
            sigmas = tuple(float(s) for s in sigmas)
            falling = all(a > b for a, b in zip(sigmas, sigmas[1:]))
            if not sigmas or not falling or sigmas[0] > 1 or sigmas[-1] <= 0:
                raise ValueError(f"{name} must fall within (0, 1], got {list(sigmas)}")
            object.__setattr__(self, name, sigmas)
        if self.shift <= 0:
            raise ValueError(f"shift must be positive, got {self.shift}")
        if not 0 <= self.context_noise < 1000:
            raise ValueError(f"context_noise is a timestep from 0 to 1000, got {self.context_noise}")
        if self.rope_mode != "absolute":
            raise ValueError(f"rope_mode {self.rope_mode!r} is unknown: keys are cached after rotation, so only "
                             "'absolute' positions can be served")

    def sigmas_for(self, chunk_index: int) -> tuple[float, ...]:
        first = self.first_chunk_sigmas
        return first if chunk_index == 0 and first is not None else self.denoising_sigmas

    def to_dict(self) -> dict:
        """JSON-ready, for the pipeline's config."""
        values = dataclasses.asdict(self)
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


FIELDS = tuple(field.name for field in dataclasses.fields(RolloutConfig))

_FOUR_STEPS = (1.0, 0.75, 0.5, 0.25)

# docs/presets.md says where every number comes from.
PRESETS = {
    "self-forcing": RolloutConfig(),
    # CausVid's steps are timesteps already. (It steps with the nearest levels of its scheduler, 0.75676 and 0.52174.)
    "causvid": RolloutConfig(denoising_sigmas=(1.0, 0.757, 0.522), shift=1.0),
    "longlive": RolloutConfig(window_frames=6, sink_frames=3),
    "causal-forcing": RolloutConfig(),
    "causal-forcing-framewise": RolloutConfig(chunk_frames=1, window_frames=20),
    "causal-forcing-framewise-2step": RolloutConfig(chunk_frames=1, window_frames=20, denoising_sigmas=(1.0, 0.5),
                                                    first_chunk_sigmas=_FOUR_STEPS),
    "causal-forcing-framewise-1step": RolloutConfig(chunk_frames=1, window_frames=20, denoising_sigmas=(1.0,),
                                                    first_chunk_sigmas=_FOUR_STEPS),
    # The geometry that block-causal Cosmos3 is served with: 4-frame chunks, 96 visible frames, frame-causal history.
    "cosmos3": RolloutConfig(chunk_frames=4, window_frames=95, clean_block_frames=1, default_fps=24),
    "embedded": RolloutConfig(denoising_sigmas=(1.0, 0.85, 0.6, 0.35, 0.15, 0.05), max_sequence_length=32,
                              default_height=96, default_width=96, default_fps=12),
}


def resolve_rollout_config(preset: str | None, overrides: dict) -> RolloutConfig | None:
    """The preset's config with single fields replaced; `None` if neither a preset nor a field is given.

    Raises:
        ValueError: for an unknown preset (the message lists them) or a bad field.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    if preset is None:
        return RolloutConfig(**given) if given else None
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}: choose one of {', '.join(PRESETS)}")
    return dataclasses.replace(PRESETS[preset], **given)
