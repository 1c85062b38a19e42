"""Cosmos3: another prompt, of another length, takes the old one's place in the fixed region."""

from unittest import mock

import pytest
import torch
from diffusers.models.transformers import transformer_cosmos3
from models_rollout import CHUNK_FRAMES, Rollout, assert_close
from tiny_models import Cosmos3, block_mask, cut


