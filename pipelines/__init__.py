"""The pipeline and its streaming decoders, imported as bc_diffusers.pipelines."""
