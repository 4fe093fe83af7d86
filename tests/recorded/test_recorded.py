"""Compare the output of commands on tiny inputs with recorded output, number by number.

Other tests check laws. These notice a change that no law forbids, such as a missing row of a table or a wrong count. A
deliberate change is recorded by `python -m tests.recorded`, and reviewed as a difference of text.
"""

from pathlib import Path

import pytest

from tests.recorded.commands import COMMANDS, make_inputs, run
from tests.recorded.transcript import differences

RECORDS = Path(__file__).parent / "records"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_writes_what_is_recorded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "folder").mkdir()
    monkeypatch.chdir(folder)
    found = run(folder, name, make_inputs(folder))
    different = differences(found, (RECORDS / f"{name}.txt").read_text(encoding="utf-8"))
    assert not different, "\n".join([*different[:20], f"If this is intended: python -m tests.recorded {name}"])


def test_a_changed_word_count_or_number_is_a_difference() -> None:
    expected = "a 12 b 0.53\n1.5e-03 x"
    for same in ("a 12 b 0.54\n1.5e-03 x", "a 12 b 0.53\n1.6e-03 x"):
        assert differences(same, expected) == []
    for other in (
        "a 13 b 0.53\n1.5e-03 x",
        "a 12 b 0.56\n1.5e-03 x",
        "a 12.5 b 0.53\n1.5e-03 x",
        "a 12 c 0.53\n1.5e-03 x",
        "a 12 b 0.53",
    ):
        assert len(differences(other, expected)) == 1
