"""``python -m hf_posenc`` is the command line ``hf-posenc``."""

from .cli import app

app(prog_name="python -m hf_posenc")
