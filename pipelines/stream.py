"""VideoStream: the rollout, chunk by chunk."""

import threading
from dataclasses import dataclass

import torch
from diffusers.utils.torch_utils import randn_tensor

from ..models import parity_adapter
from .chunk import StreamRequest, VideoChunk, chunk_seed
from .decoding import SideDecoder, Stopwatch
from .guidance import NegativeBranch
from .resources import on_device, pool_bytes


@dataclass
class _Made:
    """A chunk whose work is on its way: `video` is decoded, or not yet, on the decoder's stream."""

    index: int
    latents: torch.Tensor
    video: torch.Tensor | None
    watch: Stopwatch


class VideoStream:
    """An autoregressive rollout: iterate it for `VideoChunk`s; made by `BlockCausalVideoPipeline.stream`.

    `set_prompt`, `pause`, `resume` and `close` may be called from any thread, also while another one waits for the
    next chunk. Closing gives the cache back to the pipeline; that also happens when the last chunk is done, when
    generation raises, at the end of a `with` block, and when the stream is garbage collected because its consumer
    stopped iterating.
    """

    def __init__(self, pipe, request: StreamRequest):
        self._pipe, self._request = pipe, request
        self._turn = threading.Lock()  # held while a chunk is generated
        self._state = threading.Condition()  # guards what other threads may change
        self._closed = self._closing = self._paused = False
        self._ahead: _Made | BaseException | None = None  # the next chunk, or why there is none
        self._conditions = request.conditions
        self._conditions_in_cache: dict | None = None
        self._next_index, self._latent_frames, self._pixel_frames = 0, 0, 0
        self._resources, self._bar, self._negative = None, None, None
        self._adapter = parity_adapter(pipe._adapter) if request.geometry.parity else pipe._adapter
        pipe._interrupt = False
        device = request.geometry.device
        self._timesteps = {first: torch.tensor([1000.0 * s for s in sigmas], device=device)
                           for first, sigmas in request.sigmas.items()}
        self._context_timestep = torch.full((1,), float(request.geometry.config.context_noise), device=device)
        self._generator = request.generator
        if request.latents is None:
            self._generator = torch.Generator(device if request.generator is None else request.generator.device)
        try:
            self._resources = pipe._stock.acquire(request.geometry, self._adapter)
            decodes = request.has_frames and request.output_type != "latent"
            self._decoder = SideDecoder(pipe._make_decoder(), pipe.vae, device) if decodes else None
            self._resources.cache.open(
                request.geometry.spec, self._adapter.prompt_tokens(request.conditions) + request.geometry.sink_tokens)
            if request.negative_conditions is not None:
                self._negative = NegativeBranch(pipe, self._adapter, request.geometry, request.negative_conditions,
                                                request.guidance_scale)
            chunks = self.num_chunks
            passes = float("inf")  # tqdm's word for "unknown"
            if chunks is not None:  # each chunk's denoising passes, and a clean pass but after the last
                passes = len(request.sigmas[True]) + (chunks - 1) * (len(request.sigmas[False]) + 1)
            self._bar = pipe.progress_bar(total=passes)
        except BaseException as error:
            self.close()
            self._explain(error)
            raise

    # ------------------------------------------------------------------------------------------------ for any thread
    @property
    def num_chunks(self) -> int | None:
        """How many chunks the stream will have; `None` if it is endless."""
        frames = self._request.latent_frames
        return None if frames is None else -(-frames // self._request.geometry.config.chunk_frames)

    @property
    def next_index(self) -> int:
        """The first chunk that is not yet started."""
        return self._next_index

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def cache(self):
        """The stream's `BlockCausalKVCache` (to look at), `None` once closed."""
        return None if self._resources is None else self._resources.cache

    def set_prompt(self, prompt: str | None = None, transition: str = "cross",
                   prompt_embeds: torch.Tensor | None = None) -> int:
        """Changes the prompt from the first chunk not yet started on.

        Args:
            prompt (`str`, *optional*): the new prompt, or give `prompt_embeds` [1, tokens, text_dim].
            transition (`str`, *optional*, defaults to `"cross"`): `"cross"` swaps the text that the chunks to come
                attend to; the history stays as it was made.

        Returns:
            `int`: the index of the first chunk that follows the new prompt.
        """
        if transition != "cross":
            raise ValueError(f"transition {transition!r} is unknown: 'cross' is the only one")
        if self._closed or self._closing:
            raise RuntimeError("this stream is closed")
        with self._adapter.holder.lock:  # between two passes: with CPU offload they take turns on the device
            conditions = self._pipe._encode_conditions(prompt, prompt_embeds, self._request.max_sequence_length,
                                                       self._request.geometry, self._request.pixel_frames)
        with self._state:
            if self._closed or self._closing:  # while the text was encoded
                raise RuntimeError("this stream is closed")
            self._conditions = conditions
            return self._next_index

    def pause(self) -> None:
        """Makes the next chunk wait for `resume` (the one that is being generated is finished)."""
        with self._state:
            self._paused = True

    def resume(self) -> None:
        """Lets a paused stream go on."""
        with self._state:
            self._paused = False
            self._state.notify_all()

    def close(self) -> None:
        """Ends the rollout and gives the cache back. Idempotent. While another thread generates a chunk, that chunk
        is given up after its current pass."""
        with self._state:
            self._closing = True
            self._state.notify_all()
        if self._turn.acquire(blocking=False):  # else the generating thread sees `_closing` and releases
            try:
                self._release()
            finally:
                self._turn.release()

    def _release(self) -> None:
        if self._closed:
            return
        self._closed, self._decoder, self._ahead = True, None, None
        if self._bar is not None:
            self._bar.close()
        resources, self._resources = self._resources, None
        if resources is not None:
            self._pipe._stock.release(resources)
        negative, self._negative = self._negative, None
        if negative is not None:
            negative.release(self._pipe)
        self._pipe._free_strays()  # the pipeline may have been moved meanwhile
        holder = self._adapter.holder
        with holder.lock:
            # Not while another stream goes on, or is inside this very thread's forward (a stream that is garbage
            # collected ends anywhere): the last to end offloads the models.
            if holder.active is None and not self._pipe._stock.lent:
                self._pipe.maybe_free_model_hooks()

    def __enter__(self) -> "VideoStream":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self):
        if getattr(self, "_resources", None) is not None:
            self.close()

    # ------------------------------------------------------------------------------------------------ the rollout
    def __iter__(self) -> "VideoStream":
        return self

    def __next__(self) -> VideoChunk:
        try:
            with self._turn:
                return self._next_chunk()
        finally:
            if self._closing and not self._closed:  # another thread's close() came after this turn had looked
                self.close()

    def _next_chunk(self) -> VideoChunk:
        with self._state:
            self._state.wait_for(lambda: self._closing or not self._paused)
            if self._ahead is None and not (self._closing or self._closed or self._done()):
                self._check_place()
        try:
            made, self._ahead = self._ahead or self._make(), None
            if isinstance(made, BaseException):
                raise made
            if made is not None and self._looks_ahead(made):
                try:
                    self._ahead = self._make()
                except Exception as error:  # of the next chunk: this one is shown first
                    self._ahead = error
            chunk = None if made is None else self._finish(made)
        except BaseException as error:
            self._release()
            self._explain(error)
            raise
        if chunk is None or self._closing or (self._ahead is None and self._done()):
            self._release()
        if chunk is None:
            raise StopIteration
        return chunk

    def _make(self) -> _Made | None:
        """The next chunk, or None if there is none; on CUDA its work has only been handed to the device."""
        with self._state:
            if self._closing or self._closed or self._done():
                return None
            index, conditions = self._next_index, self._conditions
            self._next_index += 1
        return self._generate(index, conditions)

    def _looks_ahead(self, made: _Made) -> bool:
        """Whether the next chunk is started before this one is handed out, so that the device works while frames are
        decoded, copied and looked at. Not behind chunk 0, which is waited for, not where the caller has a say in each
        pass or works on the same device, and not among ranks, of which one may stop here."""
        request, alone = self._request, self._adapter.holder.ulysses is None
        return (self._decoder is not None and self._decoder.runs_beside and made.index > 0 and not self._paused
                and alone and request.output_type in ("np", "pil") and request.callback_on_step_end is None
                and self._place() == self._began())

    def _began(self) -> tuple[torch.device, torch.dtype]:
        return self._request.geometry.device, self._request.geometry.dtype

    def _place(self) -> tuple[torch.device, torch.dtype]:
        return on_device(self._pipe._execution_device), self._pipe._compute_dtype

    def _check_place(self) -> None:
        """Between two chunks the pipeline may have been moved: then the stream waits until it is back."""
        began, now = self._began(), self._place()
        if now != began:
            raise RuntimeError(f"the pipeline was moved to {now[0]} ({now[1]}) while this stream lives on {began[0]} "
                               f"({began[1]}): move it back to go on, or close the stream")

    def _explain(self, error: BaseException) -> None:
        """Out of memory: idle caches are freed, so that a smaller request can succeed, and the error says so."""
        if isinstance(error, torch.OutOfMemoryError):
            self._pipe.free_caches()
            geometry = self._request.geometry
            size = pool_bytes(geometry, self._adapter) / 2**30
            error.add_note(f"This rollout keeps {size:.2f} GiB of keys and values "
                           f"({geometry.config.window_frames} window frames of {geometry.tokens_per_frame} tokens). "
                           "Idle caches have been freed. Less: a smaller height, width or window_frames, or "
                           "enable_model_cpu_offload().")

    def _done(self) -> bool:
        return self._request.latent_frames is not None and self._latent_frames >= self._request.latent_frames

    @torch.no_grad()
    def _generate(self, index: int, conditions: dict) -> _Made | None:
        request, geometry = self._request, self._request.geometry
        self._bar.set_description(f"chunk {index + 1}/{self.num_chunks or '∞'}")
        watch = Stopwatch(geometry.device)
        frames, chunk_frames = geometry.config.chunk_frames, geometry.config.chunk_frames
        if request.latent_frames is not None:
            frames = min(frames, request.latent_frames - self._latent_frames)
        tokens = frames * geometry.tokens_per_frame
        self._resources.rotary.set_start(self._latent_frames)
        self._resources.start_chunk(self._adapter, self._pipe.cuda_graphs)
        self._put_prompt(conditions)
        if self._negative is not None:
            self._negative.start_chunk(self._latent_frames, self._pipe.cuda_graphs)
        plan = self._plan(tokens, chunk_frames * geometry.tokens_per_frame)
        with watch.span("denoise"):
            latents, conditions = self._denoise(index, frames, plan, conditions)
        if latents is None:
            return None
        self._latent_frames += frames
        video = None
        if self._decoder is not None:
            with self._decoder.after(latents), watch.span("decode"):
                video = self._decoder.decode(latents)
        if not (self._closing or self._done()):
            with watch.span("clean"):
                self._clean_pass(latents, conditions, tokens)
        return _Made(index, latents, video, watch)

    @torch.no_grad()
    def _finish(self, made: _Made) -> VideoChunk:
        frames = made.latents if self._request.output_type == "latent" else None
        if made.video is not None:
            frames = self._decoder.finish(self._to_frames, made.video)
        return VideoChunk(frames, made.latents, made.index, made.watch.seconds())

    def _denoise(self, index: int, frames: int, plan, conditions: dict) -> tuple[torch.Tensor | None, dict]:
        request, pipe, first = self._request, self._pipe, index == 0
        sigmas, timesteps = request.sigmas[first], self._timesteps[first]
        latents = self._initial_noise(index, frames)
        fixed = request.first_latents if first else None
        for i, sigma in enumerate(sigmas):
            if self._closing:
                return None, conditions
            if fixed is not None:
                latents[:, :, :1] = fixed
            velocity = self._forward(latents, timesteps[i:i + 1], conditions, plan, int(fixed is not None))
            clean = self._clean(latents, sigma, velocity)
            latents = clean if i + 1 == len(sigmas) else self._rounded(self._renoise(clean, sigmas[i + 1]))
            if fixed is not None:
                latents[:, :, :1] = fixed
            latents, conditions = self._callback(index, i, timesteps[i], latents, conditions)
            self._bar.update()
            if pipe._interrupt:  # the chunk is shown as far as it came, and is the last
                with self._state:
                    self._closing = True
                return clean, conditions
        return latents, conditions

    def _clean_pass(self, latents: torch.Tensor, conditions: dict, tokens: int) -> None:
        """Stages the finished chunk's K and V at the context noise level, and makes them history."""
        plan = self._plan(tokens, self._request.geometry.clean_block_tokens)
        clean_frames = 0 if self._request.geometry.config.context_noise else latents.shape[2]
        self._forward(latents, self._context_timestep, conditions, plan, clean_frames)
        self._resources.cache.commit()
        if self._negative is not None:
            self._negative.commit()
        self._bar.update()

    def _plan(self, tokens: int, causal_block_size: int):
        if self._negative is not None:
            self._negative.plan(tokens, causal_block_size)
        return self._resources.cache.plan(tokens, causal_block_size)

    def _put_prompt(self, conditions: dict) -> None:
        """Where a model keeps the prompt's K and V in the cache: before chunk 0, and when the prompt has changed."""
        if self._conditions_in_cache is None:
            self._adapter.begin(self._resources.cache, conditions)
        elif conditions is not self._conditions_in_cache:
            self._adapter.change_prompt(self._resources.cache, self._conditions_in_cache, conditions)
        self._conditions_in_cache = conditions

    def _forward(self, latents, timestep, conditions, plan, clean_frames: int) -> torch.Tensor:
        how = {"backend": self._request.backend, "clean_frames": clean_frames,
               "attention_kwargs": self._request.attention_kwargs}
        velocity = self._resources.forward(self._adapter, latents, timestep, conditions, plan, how)
        return velocity if self._negative is None else self._negative.guide(velocity, latents, timestep, how)

    # ------------------------------------------------------------------------------------------------ noise, callback
    def _initial_noise(self, index: int, frames: int) -> torch.Tensor:
        request, g = self._request, self._request.geometry
        if request.latents is not None:
            start = self._latent_frames
            return request.latents[:, :, start:start + frames].float()
        self._generator.manual_seed(chunk_seed(request.seed, index))
        channels = self._adapter.latent_channels(self._pipe.transformer.config)
        shape = (1, channels, frames, g.height, g.width)
        return randn_tensor(shape, generator=self._generator, device=g.device, dtype=torch.float32)

    def _clean(self, latents: torch.Tensor, sigma: float, velocity: torch.Tensor) -> torch.Tensor:
        if self._request.geometry.parity:
            return self._rounded(latents.double() - sigma * velocity.double())
        return latents - sigma * velocity.float()

    def _rounded(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents stay in float32 between passes; the original code rounds them to the model's dtype each time."""
        parity, dtype = self._request.geometry.parity, self._request.geometry.dtype
        return latents.to(dtype).float() if parity else latents

    def _renoise(self, clean: torch.Tensor, sigma: float) -> torch.Tensor:
        """To the next noise level with fresh noise, as FlowMatchLCMScheduler.step does."""
        if self._request.latents is None:
            noise = randn_tensor(clean.shape, generator=self._generator, device=clean.device, dtype=clean.dtype)
        else:  # one generator for the whole video, in the order and dtype in which Self-Forcing draws
            _, channels, frames, height, width = clean.shape
            noise = randn_tensor((frames, channels, height, width), generator=self._generator, device=clean.device,
                                 dtype=self._request.latents.dtype).transpose(0, 1)[None].to(clean.dtype)
        return (1 - sigma) * clean + sigma * noise

    def _callback(self, index: int, step: int, timestep: torch.Tensor, latents: torch.Tensor, conditions: dict
                  ) -> tuple[torch.Tensor, dict]:
        request = self._request
        if request.callback_on_step_end is None:
            return latents, conditions
        known = {"latents": latents, **conditions}
        given = {name: known[name] for name in request.callback_on_step_end_tensor_inputs}
        if index > 0:  # steps count through the whole video
            step += len(request.sigmas[True]) + len(request.sigmas[False]) * (index - 1)
        out = request.callback_on_step_end(self._pipe, step, timestep, given) or {}
        branches = [self._resources] if self._negative is None else [self._resources, self._negative.resources]
        for resources in branches:  # it may have changed the model
            resources.start_chunk(self._adapter, self._pipe.cuda_graphs)
        latents = out.pop("latents", latents)
        return latents, {name: out.get(name, value) for name, value in conditions.items()}

    def _to_frames(self, video: torch.Tensor):
        """[1, 3, F, H, W] in [-1, 1] to the output type, cut to the frames asked for."""
        if self._request.pixel_frames is not None:
            video = video[:, :, :self._request.pixel_frames - self._pixel_frames]
        self._pixel_frames += video.shape[2]
        return self._pipe.video_processor.postprocess_video(video, output_type=self._request.output_type)[0]
