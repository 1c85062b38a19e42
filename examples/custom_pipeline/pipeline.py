"""What `DiffusionPipeline.from_pretrained(..., custom_pipeline="examples/custom_pipeline")` loads.

diffusers takes the one pipeline class that this file names, so a script that knows nothing of bc_diffusers can load
any supported model with it:

    pipe = DiffusionPipeline.from_pretrained(
        "a Wan repository or folder", custom_pipeline="path/to/examples/custom_pipeline", trust_remote_code=True,
        preset="self-forcing")

diffusers copies the file to its cache of modules, so in a launch of several processes rather `import bc_diffusers`.
"""

from bc_diffusers import BlockCausalVideoPipeline as BlockCausalVideoPipeline
