"""Provide files to pack, and the store that an undisturbed run makes of them."""

from pathlib import Path

import pytest

from tests.data.pack.pack_inputs import contents, make_files, packed


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return make_files(tmp_path)


@pytest.fixture
def whole(files: Path) -> dict[str, bytes]:
    packed(files, "whole")
    return contents(files / "whole")
