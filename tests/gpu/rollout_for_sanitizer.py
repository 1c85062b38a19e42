"""A small rollout through every operator, for compute-sanitizer:

    compute-sanitizer --tool memcheck python tests/gpu/rollout_for_sanitizer.py
    compute-sanitizer --tool racecheck python tests/gpu/rollout_for_sanitizer.py

Every tensor gets an allocation of its own (PYTORCH_NO_CUDA_MEMORY_CACHING), so that an access beside one is seen.
"""

import os


os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch  # noqa: E402

from bc_diffusers import ops  # noqa: E402
from bc_diffusers.cache import BlockCausalKVCache, RolloutSpec  # noqa: E402


def main():
    spec = RolloutSpec(window_tokens=21, max_staged_tokens=12, causal_blocks={12: 1, 5: 3}, max_pin_tokens=6)
    cache = BlockCausalKVCache(num_layers=2, num_kv_heads=3, head_dim=16, page_size=4, dtype=torch.bfloat16,
                               device="cuda", pool_tokens=BlockCausalKVCache.pool_tokens_for(spec, page_size=4))
    with cache.open(spec, pin_tokens=5):
        for step in range(6):
            n, size = (12, 5) if step % 2 else (11, 12)
            plan = cache.plan(n, size)
            packed = torch.full((13, 3, 3, 16), step + 1.0, device="cuda", dtype=torch.bfloat16)
            q, k, v = packed.unbind(1)
            angles = torch.zeros(13, 8, device="cuda")
            weight = torch.ones(48 if step % 3 else 16, device="cuda")
            common = (weight, weight, angles, angles, 1e-6, step % 2 == 0)
            views = plan._views
            for layer in range(2):
                ops.qk_norm_rope_(q, k, *common)
                cache.layer(layer).write(k, v, plan)
            ops.qk_norm_rope_(q, k, *common, v=v, layer_pool=cache.layer(0).pool, dst=views.dst[:n],
                              dst2=views.dst2[:n], num_tokens=n)
            partials, lse = torch.stack([q, q, q]), torch.zeros(3, 13, 3, device="cuda")
            ops.merge_partials_(partials, lse, q, n)
            x, other = packed[:, 0].flatten(1), packed[:, 1].flatten(1)
            gate, scale, shift = torch.ones(3, 1 if step % 2 else 13, 48, device="cuda").unbind(0)
            ops.residual_norm_(x, other, gate, scale, shift, 1.0, 1e-6, torch.empty_like(x), torch.empty_like(x))
            cache.commit()
    long = torch.zeros(2, 20_000, dtype=torch.int64, device="cuda")  # beyond shared memory
    ops.rotate_rows_(long, torch.tensor(-7, device="cuda"))
    torch.cuda.synchronize()
    print("rollout done")


if __name__ == "__main__":
    main()
