"""Test settings: bases, overrides, checks, and conversion back to TOML."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpfold import settings
from warpfold.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Pair:
    channels: int = 128
    dropout: float = 0.25

    def __post_init__(self) -> None:
        if self.channels < 1:
            raise ValueError("channels must be positive")


@dataclass(frozen=True, kw_only=True)
class Model:
    pair: Pair = field(default_factory=Pair)
    order: Literal["middle", "first", "last"] = "middle"
    chunk: int | None = 4
    weights: dict[str, float] = field(default_factory=dict)
    sizes: tuple[int, ...] = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Run:
    model: Model
    name: str = "run"
    ptm: bool = False


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_overrides_its_base_and_the_command_line_overrides_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "parent.toml", 'name = "p"\n[model.pair]\nchannels = 64\ndropout = 0.5\n')
    child = write(tmp_path, "child.toml", 'base = "parent.toml"\n[model.pair]\nchannels = 32\n')
    run = settings.build(Run, settings.load(child, ["model.order=first", "model.chunk=none", "name=two words"]))
    assert run.model.pair == Pair(channels=32, dropout=0.5)
    assert (run.model.order, run.model.chunk, run.name) == ("first", None, "two words")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(settings, "PRESETS", (tmp_path,))
    of_preset = write(tmp_path / "elsewhere", "more.toml", 'base = "parent"\n[model.pair]\ndropout = 1\n')
    pair = settings.build(Run, settings.load(of_preset)).model.pair
    # An integer is accepted where a float is expected.
    assert (pair.channels, pair.dropout, type(pair.dropout)) == (64, 1.0, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model.pair]\nchanels = 3\n", "model.pair.chanels is not a setting; did you mean model.pair.channels?"),
        ("[modle]\n", "modle is not a setting; did you mean model?"),
        ("zzz = 1\n", "zzz is not a setting; known: model, name, ptm"),
        ('[model.pair]\nchannels = "3"\n', 'model.pair.channels = "3": a whole number expected'),
        ("[model.pair]\nchannels = 3.5\n", "model.pair.channels = 3.5: a whole number expected"),
        ("[model.pair]\nchannels = true\n", "model.pair.channels = true: a whole number expected"),
        ("[model.pair]\nchannels = 0\n", "model.pair: channels must be positive"),
        ("ptm = 1\n", "ptm = 1: true or false expected"),
        ("model = 1\n", "model = 1: a table expected"),
        ('[model]\norder = "up"\n', 'model.order = "up": one of "middle", "first", "last" expected'),
        ("[model]\nchunk = 1.5\n", 'model.chunk = 1.5: a whole number or "none" expected'),
        ("[model]\nsizes = 3\n", "model.sizes = 3: a list expected"),
        ("[model]\nsizes = [1, 0.5]\n", "model.sizes[1] = 0.5: a whole number expected"),
        ("[model.weights]\na = 'x'\n", 'model.weights.a = "x": a number expected'),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, "run.toml", text)
    with pytest.raises(UserError) as error:
        settings.build(Run, settings.load(path), source="run.toml")
    assert str(error.value) == f"run.toml: {message}"


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    write(tmp_path, "a.toml", 'base = "b.toml"\n')
    write(tmp_path, "b.toml", 'base = "a.toml"\n')
    write(tmp_path, "broken.toml", "a = = 1\n")
    write(tmp_path, "d.toml", 'base = "nowhere"\n')
    for name, message in [
        ("a.toml", "leads back"),
        ("broken.toml", "not valid TOML"),
        ("c.toml", r"c\.toml: no such settings"),
        ("d.toml", r"d\.toml: its base nowhere: no such"),
    ]:
        with pytest.raises(UserError, match=message):
            settings.load(tmp_path / name)
    with pytest.raises(UserError, match="KEY=VALUE"):
        settings.load(write(tmp_path, "fine.toml", ""), ["model.pair"])
    write(tmp_path, "broken.toml", "name = " + "[" * 100_000)
    with pytest.raises(UserError, match="not valid TOML"):
        settings.load(tmp_path / "broken.toml")


def test_resolved_settings_are_read_back_equal(tmp_path: Path) -> None:
    run = Run(model=Model(chunk=None, weights={"a b": 1e-6, "c": 1e300}, sizes=()), name='quote " \\ \n ü')
    path = write(tmp_path, "settings.toml", settings.to_toml(run))
    assert settings.build(Run, settings.load(path)) == run


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.text(st.characters(exclude_categories=["Cs"])),
    FINITE,
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), FINITE, max_size=3),
)
def test_any_value_survives_the_way_to_toml_and_back(text: str, number: float, table: dict[str, float]) -> None:
    run = Run(model=Model(pair=Pair(dropout=number), weights=table), name=text)
    assert settings.build(Run, settings.tomllib.loads(settings.to_toml(run))) == run


def test_differences_name_the_key_and_both_values() -> None:
    ours, theirs = (settings.to_dict(Run(model=Model(chunk=c), ptm=p)) for c, p in [(None, False), (3, True)])
    assert settings.differences(ours, theirs) == ['model.chunk: "none", not 3', "ptm: false, not true"]
    assert settings.differences(ours, ours) == []


PRESETS = Path(__file__).parents[1] / "settings"


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_preset_is_found_by_name_and_complete(path: Path) -> None:
    from warpfold.training.config import RunConfig

    run = settings.build(RunConfig, settings.load(path.stem), path.name)
    assert settings.build(RunConfig, settings.tomllib.loads(settings.to_toml(run))) == run


def test_the_supplements_values_have_their_source() -> None:
    for name in ("monomer", "finetune", "multimer", "multimer_finetune", "monomer_ptm", "distillation"):
        values = [line for line in (PRESETS / f"{name}.toml").read_text().splitlines() if " = " in line]
        assert all("#" in line or line.startswith("base") for line in values), name


@pytest.mark.parametrize("name", ["monomer", "finetune"])
def test_the_monomer_leaves_out_no_rows_clusters_chains_and_weighs_by_length(name: str) -> None:
    from warpfold.training.config import RunConfig

    run = settings.build(RunConfig, settings.load(name))
    assert (run.data.clustering, run.data.max_cost) == ("chain", 0)  # Supp. 1.2.7 and 1.2.8
    assert run.data.max_templates == 4  # table 4
    assert run.loss.scale_by_length  # Supp. 1.9


def test_fine_tuning_is_table_4s_second_column() -> None:
    first, second = (settings.load(name) for name in ("monomer", "finetune"))
    assert settings.differences(second, first) == [
        "loss.violation: 1.0, not 0.0",
        "loss.experimentally_resolved: 0.01, not 0.0",
        "data.crop: 384, not 256",
        "data.max_msa: 508, not 124",
        "data.max_extra: 5120, not 1024",
        "optim.learning_rate: 0.0005, not 0.001",
        "optim.warmup_steps: 0, not 1000",
        "train.steps: 11719, not 78125",
    ]


def test_a_multimer_is_fine_tuned_at_half_the_rate_and_otherwise_as_it_was_trained() -> None:
    assert settings.differences(settings.load("multimer_finetune"), settings.load("multimer")) == [
        "optim.learning_rate: 0.0005, not 0.001",
        "optim.warmup_steps: 0, not 1000",
        "train.steps: 11719, not 78125",
    ]


def test_clusters_and_templates_together_are_table_4s_rows() -> None:
    for name, rows in (("monomer", 128), ("finetune", 512)):
        data = settings.load(name)["data"]
        assert data["max_msa"] + data["max_templates"] == rows


def test_the_ptm_models_are_fine_tuning_with_a_head_and_its_loss() -> None:
    assert settings.differences(settings.load("monomer_ptm"), settings.load("finetune")) == [
        "model.heads.pae: true, not false",
        "loss.predicted_aligned_error: 0.1, not 0.0",
        "train.new_heads: true, not absent",
    ]


def test_distillation_is_the_first_stage_on_other_data() -> None:
    from warpfold.training.config import RunConfig

    first, second = (settings.build(RunConfig, settings.load(name)) for name in ("monomer", "distillation"))
    # Both values are also the defaults, because a monomer may train on predictions.
    assert second == first
    assert settings.load("distillation")["data"]["predicted_rows"] == 1000  # Supp. 1.3


@pytest.mark.parametrize("value", ["nan", "-inf", "9" * 5000, "0x" + "f" * 5000, str(2**63)])
@pytest.mark.parametrize("key", ["model.pair.dropout", "model.chunk", "name", "model.sizes", "model.weights.a"])
def test_numbers_that_nothing_can_compute_with_are_refused_in_one_line(tmp_path: Path, key: str, value: str) -> None:
    for written in (value, f"[{value}]", f"{{a = {value}}}"):
        path, none = write(tmp_path, "s.toml", f"{key} = {written}\n"), write(tmp_path, "none.toml", "")
        # On the command line, a value that is not valid TOML is text, which is valid for `name`.
        ways = [(path, []), (none, [f"{key}={written}"])][: 1 if key == "name" else 2]
        for source, changes in ways:
            with pytest.raises(UserError, match=r"s\.toml: ") as caught:
                settings.build(Run, settings.load(source, changes), "s.toml")
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 400
