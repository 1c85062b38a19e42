"""Many processes: the grid they form, prompts shared among them, and what happens when one of them fails."""

from .grid import ProcessGrid as ProcessGrid
from .grid import join_launch as join_launch
from .grid import make_grid as make_grid
