"""``python -m refengine``: the ``refengine`` command."""

from refengine.cli import main

main()
