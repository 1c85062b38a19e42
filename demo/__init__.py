"""The Gradio demo, imported as bc_diffusers.demo."""
