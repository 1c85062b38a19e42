"""What a caller asks for: checked, and turned into what a stream needs."""

import torch
from diffusers import FlowMatchLCMScheduler

from ..attention import CallShape, choose_backend
from .picture import picture_to_pixels
from .resources import PAGE_SIZE, RolloutGeometry, check_size
from .vae_support import encode_frame


OUTPUT_TYPES = ("np", "pt", "pil", "latent")


class RequestMixin:
    """`BlockCausalVideoPipeline`'s arguments: the text, the checks, and the parts of a `StreamRequest`."""

    # ------------------------------------------------------------------------------------------------ text
    def encode_prompt(self, prompt: str, max_sequence_length: int | None = None, device: torch.device | None = None,
                      dtype: torch.dtype | None = None) -> torch.Tensor:
        """Text embeddings [1, tokens, text_dim] as the model's own pipeline makes them; `stream` takes them as
        `prompt_embeds`.

        Args:
            prompt (`str`): cut to `max_sequence_length` tokens.
            max_sequence_length (`int`, *optional*): defaults to the rollout's.

        Raises:
            ValueError: for a model whose text does not come as embeddings.
        """
        conditions = self._adapter.encode_prompt(
            prompt, self.tokenizer, self.text_encoder, num_frames=None, height=self.rollout.default_height,
            width=self.rollout.default_width, max_tokens=max_sequence_length or self.rollout.max_sequence_length,
            device=device or self._execution_device, dtype=dtype or self._compute_dtype)
        return self._adapter_class.embeds_from_conditions(conditions)

    def _encode_conditions(self, prompt, prompt_embeds, max_sequence_length, geometry: RolloutGeometry,
                           num_frames: int | None) -> dict:
        self._check_prompt(prompt, prompt_embeds)
        return self._conditions(prompt, prompt_embeds, max_sequence_length, geometry, num_frames)

    def _conditions(self, prompt, prompt_embeds, max_sequence_length, geometry, num_frames, negative=False) -> dict:
        if prompt_embeds is not None:
            embeds = prompt_embeds.to(geometry.device, geometry.dtype)
            return self._adapter_class.conditions_from_embeds(self.transformer.config, embeds)
        scale = self.vae_scale_factor_spatial
        return self._adapter.encode_prompt(
            prompt, self.tokenizer, self.text_encoder, max_tokens=max_sequence_length, height=geometry.height * scale,
            width=geometry.width * scale, num_frames=num_frames, device=geometry.device, dtype=geometry.dtype,
            negative=negative)

    def _encode_negative(self, scale: float, prompt: str | None, prompt_embeds: torch.Tensor | None,
                         max_sequence_length: int, geometry: RolloutGeometry, num_frames: int | None) -> dict | None:
        """The conditions of guidance's second branch; `None` at scale 1, where there is none."""
        if not isinstance(scale, (int, float)) or not 1 <= scale < float("inf"):
            raise ValueError(f"`guidance_scale` must be a number of at least 1 (1: no guidance), got {scale!r}")
        if prompt is not None and not isinstance(prompt, str):
            raise TypeError(f"`negative_prompt` must be one string, got {type(prompt).__name__}")
        if scale == 1:
            if prompt is not None or prompt_embeds is not None:
                raise ValueError("a negative prompt has no effect without guidance: give `guidance_scale` above 1")
            return None
        if prompt is not None and prompt_embeds is not None:
            raise ValueError("give either `negative_prompt` or `negative_prompt_embeds`, not both")
        return self._conditions(prompt or "", prompt_embeds, max_sequence_length, geometry, num_frames, negative=True)

    @property
    def _compute_dtype(self) -> torch.dtype:
        """The transformer's; for weights in a quantized type the text encoder's."""
        dtype = self.transformer.dtype
        if dtype in (torch.float32, torch.bfloat16, torch.float16):
            return dtype
        return torch.bfloat16 if self.text_encoder is None else self.text_encoder.dtype

    # ------------------------------------------------------------------------------------------------ checks
    def _check_prompt(self, prompt, prompt_embeds) -> None:
        if (prompt is None) == (prompt_embeds is None):
            raise ValueError("give either `prompt` or `prompt_embeds`, not both and not neither")
        if isinstance(prompt, (list, tuple)):
            raise ValueError(f"a stream is one video and takes one prompt, got a list of {len(prompt)}: start one "
                             "stream a prompt, or call the pipeline with the list")
        if prompt is not None and not isinstance(prompt, str):
            raise TypeError(f"`prompt` must be a string, got {type(prompt).__name__}")
        if prompt is not None and not prompt.strip():
            raise ValueError("`prompt` is empty: say what the video shows")
        if prompt_embeds is not None:
            self._adapter_class.conditions_from_embeds(self.transformer.config, prompt_embeds)

    def check_inputs(self, height: int, width: int, output_type: str = "np",
                     callback_on_step_end_tensor_inputs=("latents",)) -> None:
        """Raises a ValueError that names the nearest size that works, or what else is allowed."""
        _, patch_height, patch_width = self._adapter_class.patch_size(self.transformer.config)
        for name, value, patch in (("height", height, patch_height), ("width", width, patch_width)):
            check_size(name, value, self.vae_scale_factor_spatial * patch)
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"`output_type` must be one of {', '.join(OUTPUT_TYPES)}, got {output_type!r}")
        unknown = [name for name in callback_on_step_end_tensor_inputs if name not in self._callback_tensor_inputs]
        if unknown:
            raise ValueError(f"`callback_on_step_end_tensor_inputs` knows {self._callback_tensor_inputs}, "
                             f"not {unknown}")

    def _check_latents(self, latents: torch.Tensor, geometry: RolloutGeometry, latent_frames: int | None) -> None:
        channels = self._adapter_class.latent_channels(self.transformer.config)
        shape = [1, channels, latent_frames or latents.shape[2], geometry.height, geometry.width]
        if list(latents.shape) != shape:
            raise ValueError(f"`latents` (the noise of all chunks) must be {shape}, got {list(latents.shape)}")
        if not latents.is_floating_point():
            raise ValueError(f"`latents` must be floating point, got {latents.dtype}")
        if latents.device != geometry.device:
            raise ValueError(f"`latents` are on {latents.device}, the pipeline runs on {geometry.device}")

    # ------------------------------------------------------------------------------------------------ of a request
    def _geometry(self, height: int, width: int, max_sequence_length: int) -> RolloutGeometry:
        scale, config = self.vae_scale_factor_spatial, self.transformer.config
        height, width = height // scale, width // scale
        tokens = self._adapter_class.tokens_per_frame(config, height, width)
        return RolloutGeometry(self.rollout, height, width, tokens, self._compute_dtype,
                               torch.device(self._execution_device),
                               self._adapter_class.max_prompt_tokens(config, max_sequence_length))

    def _check_backend(self, backend: str, geometry: RolloutGeometry) -> None:
        layers = self._adapter_class.layer_geometry(self.transformer.config)
        shards = geometry.head_shards
        choose_backend(backend, CallShape(geometry.device, geometry.dtype, layers.num_heads // shards,
                                          layers.num_kv_heads // shards, layers.head_dim, PAGE_SIZE))

    def _count_frames(self, num_chunks, num_frames, latents) -> tuple[int | None, int | None]:
        """(latent frames, pixel frames) of the request; None where it is endless or not cut."""
        if num_chunks is not None and num_frames is not None:
            raise ValueError("give either `num_chunks` or `num_frames`, not both")
        for name, value in (("num_chunks", num_chunks), ("num_frames", num_frames)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"`{name}` must be a whole number of at least 1, got {value!r}")
        if num_chunks is not None:
            return num_chunks * self.rollout.chunk_frames, None
        if num_frames is not None:
            return -(-(num_frames - 1) // self.vae_scale_factor_temporal) + 1, num_frames
        return None, None

    def _shifted_sigmas(self, sigmas: tuple[float, ...]) -> list[float]:
        scheduler = FlowMatchLCMScheduler.from_config(self.scheduler.config)
        scheduler.set_timesteps(sigmas=list(sigmas), device="cpu")
        return scheduler.sigmas[:-1].tolist()

    def _base_seed(self, seed: int | None, generator: torch.Generator | None) -> int:
        if seed is not None:
            return int(seed)
        device = "cpu" if generator is None else generator.device
        return int(torch.randint(2**62, (1,), generator=generator, device=device))

    def _encode_image(self, image, height: int, width: int, geometry: RolloutGeometry) -> torch.Tensor:
        """The picture as a normalised latent frame [1, C, 1, h, w]."""
        pixels = picture_to_pixels(image, height, width, self.video_processor)
        return encode_frame(self.vae, pixels.to(geometry.device))
