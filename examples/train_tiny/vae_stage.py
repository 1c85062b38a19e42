"""Train the VAE on rendered clips, the step as one CUDA graph where there is a GPU."""

import torch
import torch.nn.functional as F
from shape_world import make_clips
from stages import note
from tiny_nets import decode, encode


def clip_bytes(n, frames, generator, batch=256):
    """-> uint8 videos [n, 3, frames, H, W] and masks [n, 1, frames, H, W] of the object and two pixels around it."""
    videos, masks = [], []
    for start in range(0, n, batch):
        clips = make_clips(min(batch, n - start), 3, generator, frames=frames)
        videos.append((clips.video * 127.5 + 127.5).round().clamp(0, 255).byte())
        near = F.max_pool2d(clips.cover.flatten(0, 2)[:, None], 5, 1, 2).view_as(clips.cover)
        masks.append((near * 255).byte())
    return torch.cat(videos), torch.cat(masks)


def weighted_losses(video, mask, out, mean, log_variance):
    """L1 and MSE (the object counts five times), differences in space and time, and the divergence from a normal."""
    weight = 1 + 4 * mask
    l1 = (weight * (out - video).abs()).mean()
    mse = (weight * (out - video).square()).mean()
    edge = 0.0
    for dim, share in ((-1, 0.5), (-2, 0.5), (2, 0.25)):
        kept = weight.narrow(dim, 1, weight.shape[dim] - 1)
        edge = edge + share * (kept * (out.diff(dim=dim) - video.diff(dim=dim)).abs()).mean()
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    return l1 + mse + edge + 2e-4 * divergence, l1, mse


class VaeStep:
    """One optimiser step on `batch` clips of a pool; `rows` [batch] says which."""

    def __init__(self, vae, videos, masks, batch, autocast):
        self.vae, self.videos, self.masks, self.autocast = vae, videos, masks, autocast
        self.device = videos.device
        self.rows = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.lr = torch.zeros((), device=self.device)
        self.parameters = list(vae.parameters())
        fast = {"fused": True, "capturable": True} if self.device.type == "cuda" else {}
        self.optimizer = torch.optim.AdamW(self.parameters, lr=self.lr, betas=(0.9, 0.99), weight_decay=1e-4, **fast)
        self.losses = torch.zeros(3, device=self.device)
        self.graph = None

    def _step(self):
        video, mask = self.videos[self.rows].float() / 127.5 - 1, self.masks[self.rows].float() / 255
        with self.autocast():
            mean, log_variance = encode(self.vae, video).float().chunk(2, 1)
            log_variance = log_variance.clamp(-20, 10)
            latents = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
            # The decoder must bear the small errors of a diffusion model.
            error = 0.06 * torch.rand(len(video), 1, 1, 1, 1, device=self.device) * mean.detach().std()
            out = decode(self.vae, latents + error * torch.randn_like(latents)).float()
        loss, l1, mse = weighted_losses(video, mask, out, mean, log_variance)
        self.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        self.losses.copy_(torch.stack([loss.detach(), l1.detach(), mse.detach()]))

    def capture(self):
        """Record the step as a CUDA graph; on another device this does nothing."""
        if self.device.type != "cuda":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()

    def run(self, lr):
        self.lr.fill_(lr)
        self.rows.copy_(torch.randint(len(self.videos), self.rows.shape, device=self.device))
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()


def train_vae(vae, schedule, log, autocast, clips=4096, frames=17, batch=24, seed=0, every=100):
    """Train `vae` in place, then measure its latents' mean and standard deviation into its config."""
    generator = torch.Generator(next(vae.parameters()).device).manual_seed(seed)
    step = VaeStep(vae.train(), *clip_bytes(clips, frames, generator), batch, autocast)
    step.capture()
    for lr in schedule:
        step.run(lr)
        note(schedule, step, log, "vae", every)
    vae.eval()
    psnr = measure_latents(vae, step.videos[: min(192, clips)])
    log.append({"stage": "vae", "step": schedule.step, "psnr": psnr})
    return schedule.step


@torch.no_grad()
def measure_latents(vae, videos):
    """Write latents_mean and latents_std of uint8 `videos` into the config; returns the reconstruction's PSNR in
    dB."""
    video = videos.float() / 127.5 - 1
    latents = torch.cat([encode(vae, part).chunk(2, 1)[0] for part in video.split(32)])
    out = torch.cat([decode(vae, part) for part in latents.split(32)]).clamp(-1, 1)
    mean, std = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
    values = {"latents_mean": mean, "latents_std": std}
    vae.register_to_config(**{name: [round(v, 5) for v in value.tolist()] for name, value in values.items()})
    return (-10 * torch.log10((out - video).square().mean() / 4)).item()
