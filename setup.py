"""Puts the embedded pair and its heads into the wheel; pyproject.toml says everything else.

In a clone the pair stays where it is. An image's build has no pair here: the image copies it in by itself.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

MODELS = Path(__file__).parent / "models"


class BuildWithPair(build_py):
    """Builds the packages, and copies `models` to `outrider/models`."""

    def run(self) -> None:
        """Builds into `build_lib`."""
        super().run()
        if MODELS.is_dir() and not self.editable_mode:
            shutil.copytree(MODELS, Path(self.build_lib) / "outrider" / "models", dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithPair})
