"""model.path, data.path and eval.path: what is a place on this disk, what a hub id, and what is said of neither."""

import json
import os

import pytest

from tonnage.config.compose import compose_config
from tonnage.config.schema import DataSet, Model
from tonnage.data.formats import Source
from tonnage.errors import DataError, ModelError, TonnageError
from tonnage.models import folder as module
from tonnage.models.build import read_config
from tonnage.models.folder import resolve_folder
from tonnage.runtime.paths import broken_link, may_be_hub_id
from tonnage.train.session import check_paths


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, and it is an error to ask the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_download", lambda model, hub_id: pytest.fail(f"{hub_id}: the hub was asked"))
    os.symlink("loop", "loop")
    os.symlink("nowhere", "dangling")
    return tmp_path


@pytest.mark.parametrize("path, link", [
    ("loop", "loop"), ("loop/x", "loop"), ("./loop/x", "loop"), ("dangling/x", "dangling"), ("dangling", "dangling"),
    ("/nowhere", None), ("./x", None), ("../x", None), ("~/x", None), ("x/y.gguf", None), ("a/b/c", None), ("x", None),
    ("", None), ("own er/name", None), ("x" * 300, None)])
def test_what_is_no_hub_id_is_an_error_about_the_path(here, path, link):
    config = compose_config(["model=custom", f'model.path="{path}"'])
    with pytest.raises(ModelError) as error:
        resolve_folder(config.model)
    assert str(error.value).startswith(f"model.path={os.path.expanduser(path)}: no such file or folder")
    assert link is None or f"({link} is a link that leads nowhere)" in str(error.value)


@pytest.mark.parametrize("path", ["loop", "loop/x", "dangling", "dangling/x"])
def test_a_link_that_leads_nowhere_is_no_data_set_of_the_hub(here, path):
    with pytest.raises(DataError, match="is a link that leads nowhere.*check data.path"):
        Source(DataSet(path=path))


def test_a_hub_id_stays_one_until_a_place_of_that_name_is_here(here):
    assert may_be_hub_id("owner/name") and may_be_hub_id("name") and broken_link("owner/name") is None
    (here / "owner").mkdir()
    assert may_be_hub_id("owner/name")  # a folder of one model's owner does not hide the others on the hub
    (here / "owner" / "name").mkdir()
    assert not may_be_hub_id("owner/name")


def test_the_home_folder_is_meant_by_its_sign(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    (here / "models").mkdir()
    assert compose_config(["model=custom", 'model.path="~/models"']).model.path == str(here / "models")


# ---- models that do not predict the next token

@pytest.mark.parametrize("config", [
    {"model_type": "bert"}, {"model_type": "roberta"}, {"model_type": "modernbert"}, {"model_type": "t5"},
    {"model_type": "bart"}, {"model_type": "vit"}, {"model_type": "bert", "architectures": ["BertForCausalLM"]}])
def test_an_encoder_is_refused_from_its_config_alone(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as error:
        resolve_folder(Model(path=str(tmp_path)))
    said = f"model.path={tmp_path}: model_type {config['model_type']} is no causal language model;"
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("config", [
    {"model_type": "llama"}, {"model_type": "llama", "is_decoder": False}, {"model_type": "gpt_neox"},
    {"model_type": "gemma3_text"}, {"model_type": "bert", "is_decoder": True}])
def test_a_decoder_is_not(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(str(tmp_path)).model_type == config["model_type"]


# ---- what a dry run tells

def refusal(*overrides):
    with pytest.raises(TonnageError) as error:
        check_paths(compose_config(overrides))
    return str(error.value)


def test_a_dry_run_looks_at_each_path_that_the_run_reads(here, tiny_folder):
    good = ["model=custom", f"model.path={tiny_folder}"]
    check_paths(compose_config(good))
    check_paths(compose_config(["model=llama7b", "data=files", "data.path=owner/name", "eval.path=owner/name"]))
    assert refusal("model=custom", "model.path=./gone").startswith("model.path=./gone: no such file or folder")
    assert refusal(*good, "data.path=gone.jsonl").startswith("gone.jsonl: no such file or folder; check data.path")
    assert refusal(*good, "eval.path=gone.jsonl").startswith("gone.jsonl: no such file or folder; check eval.path")
    assert refusal(*good, "data.chat_template=gone.jinja").startswith("data.chat_template=gone.jinja: cannot be read")
    (here / "empty.jsonl").write_text("")
    assert "the file is empty" in refusal(*good, "data=files", "data.sets=[{path: empty.jsonl}]", "data.path=null")
    (here / "bert").mkdir()
    (here / "bert" / "config.json").write_text('{"model_type": "bert"}')
    assert "model_type bert is no causal" in refusal("model=custom", "model.path=bert")
