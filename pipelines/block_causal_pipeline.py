"""BlockCausalVideoPipeline: autoregressive video generation with stock diffusers models."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import torch
from diffusers import DiffusionPipeline, FlowMatchLCMScheduler
from diffusers.loaders import WanLoraLoaderMixin
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.wan.pipeline_output import WanPipelineOutput
from diffusers.video_processor import VideoProcessor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..distributed import ProcessGrid
from ..models import VideoFormat, adapter_class_for
from .chunk import StreamRequest
from .context_parallel import agree_on_noise, check_shared, share_video
from .loading import NO_PRESET, LoadingMixin, check_text_to_video
from .placement import PlacementMixin
from .request import RequestMixin
from .resources import ResourceStock
from .rollout_config import FIELDS, RolloutConfig, resolve_rollout_config
from .stream import VideoStream
from .streaming_decoder import StreamingDecoder
from .vae_support import make_streaming_decoder, scale_factors


class BlockCausalVideoPipeline(LoadingMixin, RequestMixin, PlacementMixin, DiffusionPipeline, WanLoraLoaderMixin):
    """Text-to-video with an autoregressive ("block-causal") transformer through an exact paged K/V cache.

    A chunk of latent frames is denoised in a few passes, attending to the sink frames, a sliding window of finished
    frames and itself; a clean pass writes its keys and values into the cache; its frames are decoded and handed out;
    and so on, endlessly if asked.

    Loads a model's stock folder or repository (with `preset=`), a folder it saved itself, or another pipeline
    (`from_pipe`). The transformer stays stock: a stock pipeline that shares it gives the same bits as before.

    Args:
        tokenizer, text_encoder: as in the model's own pipeline; `None` where it has no text encoder, or for use with
            `prompt_embeds` alone.
        vae (`AutoencoderKLWan` or a decoder with the interface of `StreamingDecoder`): turns latents into frames.
        scheduler: any; replaced by a `FlowMatchLCMScheduler` with the rollout's shift.
        transformer: a diffusers transformer with an adapter (see `bc_diffusers.models`).
        preset (`str`, *optional*): how the checkpoint rolls out, one of `PRESETS` (docs/presets.md). Required for
            folders that do not say it themselves.
        chunk_frames, window_frames, sink_frames, denoising_sigmas, first_chunk_sigmas, shift, context_noise,
        clean_block_frames, rope_mode, max_sequence_length, default_height, default_width, default_fps (*optional*):
            single fields of `RolloutConfig`, which override the preset's.
    """

    # Forwards are captured in CUDA graphs and replayed (on CUDA, without offloading). Set it to False for a
    # transformer that makes its own graphs (`compile(mode="reduce-overhead")`).
    cuda_graphs = True
    model_cpu_offload_seq = "text_encoder->transformer"
    _optional_components = ["tokenizer", "text_encoder"]
    # Without the VAE, which decodes after every chunk: in turns with the transformer both would move each time.
    _exclude_from_cpu_offload = ["vae"]
    _callback_tensor_inputs = ["latents", "prompt_embeds"]

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        text_encoder: PreTrainedModel,
        vae: ModelMixin,
        scheduler: FlowMatchLCMScheduler,
        transformer: ModelMixin,
        preset: str | None = None,
        chunk_frames: int | None = None,
        window_frames: int | None = None,
        sink_frames: int | None = None,
        denoising_sigmas: list[float] | None = None,
        first_chunk_sigmas: list[float] | None = None,
        shift: float | None = None,
        context_noise: float | None = None,
        clean_block_frames: int | None = None,
        rope_mode: str | None = None,
        max_sequence_length: int | None = None,
        default_height: int | None = None,
        default_width: int | None = None,
        default_fps: int | None = None,
        adapter_options: dict | None = None,
    ):
        super().__init__()
        values = locals()
        rollout = resolve_rollout_config(preset, {name: values[name] for name in FIELDS})
        if rollout is None:
            raise ValueError(NO_PRESET)
        if transformer is None:
            raise ValueError("this folder has no transformer (its model_index.json names none)")
        check_text_to_video(transformer.config)
        self.rollout: RolloutConfig = rollout
        if not isinstance(scheduler, FlowMatchLCMScheduler):
            scheduler = FlowMatchLCMScheduler(shift=rollout.shift)
        elif scheduler.config.shift != rollout.shift:
            scheduler = FlowMatchLCMScheduler.from_config(scheduler.config, shift=rollout.shift)
        self.register_modules(tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, scheduler=scheduler,
                              transformer=transformer)
        self.register_to_config(preset=preset, adapter_options=adapter_options or {}, **rollout.to_dict())
        self._adapter_class = adapter_class_for(type(transformer).__name__)
        self._callback_tensor_inputs = ["latents", *self._adapter_class.forward_conditions]
        self.lora_state_dict = self._adapter_class.lora_loader.lora_state_dict  # load_lora_weights calls it
        self._stock = ResourceStock()
        self._interrupt = False
        self.vae_scale_factor_temporal, self.vae_scale_factor_spatial = scale_factors(vae)
        self.video_processor = VideoProcessor(vae_scale_factor=self.vae_scale_factor_spatial)

    @property
    def _adapter(self):
        video = VideoFormat(self.rollout.default_fps, self.vae_scale_factor_temporal, self.vae_scale_factor_spatial)
        return self._adapter_class(self.transformer, video, self.config.adapter_options)

    @property
    def interrupt(self) -> bool:
        """Set `pipe._interrupt = True` (from a callback, say) to end a rollout after the current pass."""
        return self._interrupt

    # ------------------------------------------------------------------------------------------------ generation
    def stream(
        self,
        prompt: str | None = None,
        *,
        num_chunks: int | None = None,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        latents: torch.Tensor | None = None,
        image: "PIL.Image.Image | np.ndarray | torch.Tensor | None" = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt: str | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        guidance_scale: float = 1.0,
        output_type: str = "np",
        max_sequence_length: int | None = None,
        attention_backend: str = "auto",
        parity: bool = False,
        attention_kwargs: dict[str, Any] | None = None,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: tuple[str, ...] | list[str] = ("latents",),
    ) -> VideoStream:
        """Starts a rollout and hands out its chunks as they are made.

        Args:
            prompt (`str`): or `prompt_embeds` [1, tokens, text_dim].
            num_chunks (`int`, *optional*): how many chunks; `num_frames`, pixel frames, is the other way to say it.
                Neither: endless.
            height, width (`int`, *optional*): pixels; default to the model's own.
            generator (`torch.Generator`, *optional*), seed (`int`, *optional*): where the noise comes from. A chunk's
                noise depends on the seed and its number alone. A generator gives the seed (and advances).
            latents (`torch.Tensor`, *optional*): [1, C, f, h, w], the initial noise of all chunks at once. The noise
                between passes is then drawn in order, as [frames, C, h, w] in the dtype of `latents`, from
                `generator`, from `seed`, or from torch's global state: as Self-Forcing draws it.
            image (*optional*): a picture that becomes the first frame: a PIL image, an array [H, W, 3] or a tensor
                [3, H, W], uint8 or in [0, 1]; resized to `height` x `width`. The rest of the first chunk is made
                around it.
            guidance_scale (`float`, *optional*, defaults to 1): above 1, classifier-free guidance against
                `negative_prompt` (or `negative_prompt_embeds`, as `prompt_embeds`; default: the empty text), with a
                second cache and twice the passes. Distilled models do without, and 1 costs nothing.
            output_type (`str`, *optional*, defaults to `"np"`): `"np"`, `"pt"`, `"pil"` or `"latent"`.
            attention_backend (`str`, *optional*, defaults to `"auto"`): see `block_causal_attention`.
            parity (`bool`, *optional*, defaults to `False`): round as the model's original code does (Wan; slower).
                Only for comparing videos with it: diffusers' roundings, the default, are the finer ones.
            attention_kwargs (`dict`, *optional*): `{"scale": ...}` for LoRA.
            callback_on_step_end: `callback(pipe, step, timestep, kwargs)` after each denoising pass; may return new
                `latents` and `prompt_embeds`.

        Returns:
            [`VideoStream`]: an iterator of [`VideoChunk`]s. Two streams may be alive at once; each has its own cache.
        """
        height = self.rollout.default_height if height is None else height
        width = self.rollout.default_width if width is None else width
        self._check_prompt(prompt, prompt_embeds)
        self.check_inputs(height, width, output_type, callback_on_step_end_tensor_inputs)
        length = self.rollout.max_sequence_length if max_sequence_length is None else max_sequence_length
        if not isinstance(length, int) or length < 1:
            raise ValueError(f"`max_sequence_length` must be a whole number of at least 1, got {length!r}")
        group = self._adapter.ulysses_group()
        geometry = dataclasses.replace(self._geometry(height, width, length), parity=parity,
                                       head_shards=1 if group is None else group.degree)
        self._check_backend(attention_backend, geometry)
        latent_frames, pixel_frames = self._count_frames(num_chunks, num_frames, latents)
        if latents is not None:
            self._check_latents(latents, geometry, latent_frames)
            latent_frames = latents.shape[2]
        if seed is not None and generator is not None:
            raise ValueError("give either `seed` or `generator`, not both")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"`generator` must be one torch.Generator, got {type(generator).__name__}")
        if generator is not None and generator.device.type not in ("cpu", geometry.device.type):
            raise ValueError(f"`generator` is on {generator.device}, the pipeline runs on {geometry.device}: use a "
                             "generator of that device or of the CPU")
        if latents is not None and seed is not None:
            generator = torch.Generator(geometry.device).manual_seed(seed)
        # All that can still be refused comes before the generator is asked.
        first_latents = None if image is None else self._encode_image(image, height, width, geometry)
        conditions = self._encode_conditions(prompt, prompt_embeds, length, geometry, num_frames)
        negative_conditions = self._encode_negative(guidance_scale, negative_prompt, negative_prompt_embeds, length,
                                                    geometry, num_frames)
        if group is not None:
            check_shared(group, geometry, self._adapter_class.layer_geometry(self.transformer.config), latent_frames)
        base_seed = self._base_seed(seed, generator) if latents is None else 0
        if group is not None:
            base_seed, latents, generator = agree_on_noise(group, geometry.device, base_seed, latents, generator)
        request = StreamRequest(
            geometry=geometry, first_latents=first_latents, conditions=conditions,
            sigmas={first: self._shifted_sigmas(self.rollout.sigmas_for(int(not first))) for first in (True, False)},
            seed=base_seed, latent_frames=latent_frames, pixel_frames=pixel_frames, output_type=output_type,
            has_frames=group is None or group.rank == 0, generator=generator, latents=latents,
            backend=attention_backend, max_sequence_length=length, attention_kwargs=attention_kwargs,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=tuple(callback_on_step_end_tensor_inputs),
            guidance_scale=guidance_scale, negative_conditions=negative_conditions)
        return VideoStream(self, request)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        prompt_embeds: torch.Tensor | None = None,
        output_type: str = "np",
        return_dict: bool = True,
        **kwargs,
    ) -> WanPipelineOutput | tuple:
        """Generates whole videos: `stream` joined. Takes `stream`'s arguments; a list of prompts is generated one
        after the other.

        Args:
            num_frames (`int`, *optional*): pixel frames; any count, also not 4k + 1. Default: what `num_chunks` or
                `latents` say, else 81.

        Returns:
            [`~diffusers.pipelines.wan.pipeline_output.WanPipelineOutput`] with `frames` as `WanPipeline` gives them
            (`"np"` [B, F, H, W, 3], `"pt"` [B, F, 3, H, W], `"pil"` lists, `"latent"` [B, C, f, h, w]), or a tuple.
        """
        if isinstance(prompt, (list, tuple)) and not prompt:
            raise ValueError("`prompt` is an empty list")
        prompts = prompt if isinstance(prompt, (list, tuple)) else [prompt]
        generators = generator if isinstance(generator, list) else [generator] * len(prompts)
        if len(generators) != len(prompts):
            raise ValueError(f"got {len(generators)} generators for {len(prompts)} prompts")
        for text in prompts:  # all of them before the first video is made
            self._check_prompt(text, prompt_embeds)
        if num_frames is None and kwargs.get("num_chunks") is None and kwargs.get("latents") is None:
            num_frames = 81
        videos = []
        for text, own_generator in zip(prompts, generators):
            with self.stream(text, num_frames=num_frames, height=height, width=width, generator=own_generator,
                             prompt_embeds=prompt_embeds, output_type=output_type, **kwargs) as chunks:
                videos.append([chunk.frames for chunk in chunks])
        if videos and any(frames is None for video in videos for frames in video):  # another rank has them
            frames = None
        elif output_type == "pil":
            frames = [[image for chunk in video for image in chunk] for video in videos]
        elif output_type == "np":
            frames = np.stack([np.concatenate(video) for video in videos])
        elif output_type == "pt":
            frames = torch.stack([torch.cat(video) for video in videos])
        else:
            frames = torch.cat([torch.cat(video, 2) for video in videos])
        return WanPipelineOutput(frames=frames) if return_dict else (frames,)

    def enable_context_parallel(self, ulysses_degree: int = 1) -> ProcessGrid:
        """Shares every video among `ulysses_degree` processes of an `accelerate launch` (or torchrun): heads, and with
        them the K/V cache, inside the attentions, tokens between them. All processes call this and then start the
        same streams with the same arguments; each group's first rank decodes, `frames` are `None` on the others. The
        transformer stays whole for a stock pipeline that shares it.

        diffusers' own `transformer.enable_parallelism` works too, before or after this pipeline is made; there,
        lengths that do not divide are refused.

        Args:
            ulysses_degree (`int`, *optional*, defaults to 1): divides the processes and the model's heads. 1: every
                process makes videos of its own.

        Returns:
            [`ProcessGrid`]: its `share(prompts)` are this group's part of a list.

        Raises:
            ValueError: for a degree that does not work; the message names those that do.
        """
        return share_video(self, ulysses_degree)

    def free_caches(self) -> None:
        """Frees the pools (and graphs) of finished streams; those of streams that are alive stay with them."""
        self._stock.free()

    def _make_decoder(self) -> StreamingDecoder:
        return make_streaming_decoder(self.vae)
