"""Original checkpoints of the Wan family: read, checked, turned into diffusers models and folders."""

from .convert import convert_checkpoint as convert_checkpoint
from .files import CheckpointError as CheckpointError
from .transformer import KeyMismatch as KeyMismatch
from .transformer import load_transformer as load_transformer
