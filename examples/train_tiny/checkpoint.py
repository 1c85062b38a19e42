"""Checkpoints in files of at most 16 MiB: averages and weights in fp16, the optimiser's moments in bf16."""

import copy
from pathlib import Path

import torch


def _half(module):
    return {k: v.detach().cpu().half() if v.is_floating_point() else v.cpu() for k, v in module.state_dict().items()}

def save_nets(path, nets):
    """Write the weights of several networks into one file, in fp16."""
    torch.save([_half(net) for net in nets], path)


def load_nets(path, like):
    """Copies of the networks `like` with the weights of a file of `save_nets`."""
    nets = tuple(copy.deepcopy(net) for net in like)
    for net, state in zip(nets, torch.load(path, map_location="cpu")):
        net.load_state_dict(state)
    return nets


def save(folder, step, vae):
    """Write vae.pt, average.pt, weights.pt, moment1.pt and moment2.pt into `folder`."""
    folder = Path(folder)
    statistics = {"mean": list(vae.config.latents_mean), "std": list(vae.config.latents_std)}
    torch.save({"vae": _half(vae), **statistics}, folder / "vae.pt")
    save_nets(folder / "average.pt", step.average)
    save_nets(folder / "weights.pt", (step.transformer, step.text))
    for number, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
        # Square roots keep the second moments inside bf16's precision where it matters: as a step size.
        moments = [step.optimizer.state[p].get(name) if p in step.optimizer.state else None for p in step.parameters]
        moments = [None if m is None else (m.sqrt() if number == 2 else m).bfloat16().cpu() for m in moments]
        torch.save(moments, folder / f"moment{number}.pt")
    counts = [float(step.optimizer.state[p]["step"]) if p in step.optimizer.state else 0.0 for p in step.parameters]
    torch.save(counts, folder / "steps.pt")


def load_vae(folder, vae):
    saved = torch.load(Path(folder) / "vae.pt", map_location="cpu")
    vae.load_state_dict(saved["vae"])
    vae.register_to_config(latents_mean=saved["mean"], latents_std=saved["std"])


def load(folder, step):
    """Take weights, averages and, where they are there, the optimiser's moments back into `step`. Before `capture`."""
    folder = Path(folder)
    nets = ((step.transformer, step.text), step.average)
    for name, pair in zip(("weights.pt", "average.pt"), nets):
        for net, state in zip(pair, torch.load(folder / name, map_location="cpu")):
            net.load_state_dict(state)
    if not (folder / "moment1.pt").exists():
        return
    first, second = (torch.load(folder / f"moment{i}.pt", map_location=step.device) for i in (1, 2))
    counts = torch.load(folder / "steps.pt")
    for p, m1, m2, count in zip(step.parameters, first, second, counts):
        if m1 is None:
            continue
        state = step.optimizer.state[p]
        state["step"] = torch.tensor(count, device=step.device if step.device.type == "cuda" else "cpu")
        state["exp_avg"], state["exp_avg_sq"] = m1.float(), m2.float().square()
