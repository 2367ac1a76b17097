"""The run folder: made once, never overwritten, held by one process, without secrets."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
import yaml

from tonnage.config.compose import compose_config
from tonnage.errors import ConfigError
from tonnage.runtime import runs
from tonnage.runtime.runs import (
    REDACTED,
    add_attempt,
    claim_run,
    create_run,
    lock_run,
    read_config,
    read_status,
    redacted,
    write_status,
)


@pytest.fixture
def run(tmp_path):
    return create_run(str(tmp_path / "outputs"), "mine", "model-lora", {"seed": 3, "model": {"name": "m"}})


# ---- making one

def test_a_run_has_its_parts_and_its_config(run):
    assert {path.name for path in run.iterdir()} == {"attempts", "checkpoints", "logs", "config.yaml", "run-id"}
    assert read_config(run) == {"seed": 3, "model": {"name": "m"}} and run.is_absolute() and read_status(run) == {}


def test_a_name_is_used_once_and_what_is_there_stays(run):
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(ConfigError) as error:
        create_run(str(run.parent), "mine", "other", {"seed": 4})
    assert "run.name=mine" in str(error.value) and f"run={run}" in str(error.value)
    assert (run / "config.yaml").read_bytes() == before


def test_a_name_is_free_again_where_no_step_was_taken(run):
    runs.add_attempt(run, {"n": 1})
    (run / "logs" / "rank-0.log").write_text("why")
    (run / "metrics.jsonl").write_text('{"step": 0, "attempt": 1, "eval_loss": 2.0}\n')
    write_status(run, "failed", "adapter.targets", step=0)
    before = runs.run_id(run)
    folder, lock = claim_run(str(run.parent), "mine", "other", {"seed": 4})
    with lock, pytest.raises(ConfigError, match="another process is running it"):
        claim_run(str(run.parent), "mine", "other", {"seed": 5})
    assert folder == run and read_config(run) == {"seed": 4} and runs.run_id(run) == before
    assert (run / "logs" / "rank-0.log").read_text() == "why" and add_attempt(run, {}) == 2
    assert not list(run.glob(".config*"))


@pytest.mark.parametrize("trace", ["status", "metrics", "checkpoint", "half a checkpoint", "not yet started"])
def test_a_name_is_taken_where_a_step_may_have_been_taken(run, trace):
    write_status(run, "failed", "x", step=int(trace == "status"))
    if trace == "metrics":  # status.json lags behind
        (run / "metrics.jsonl").write_text('{"step": 0, "attempt": 1}\n{"step": 1, "attempt": 1}\n{"st')
    if "checkpoint" in trace:
        (run / "checkpoints" / ("step-00000000" if trace == "checkpoint" else ".writing-step-00000001")).mkdir()
    if trace == "not yet started":
        (run / "status.json").unlink()
    with pytest.raises(ConfigError, match="run.name=mine: .* exists"):
        claim_run(str(run.parent), "mine", "other", {"seed": 4})
    assert read_config(run)["seed"] == 3


def test_of_many_that_want_a_free_name_again_one_gets_it(run):
    write_status(run, "failed", "x", step=0)

    def try_it(number):
        try:
            return number, claim_run(str(run.parent), "mine", "label", {"number": number})[1]
        except ConfigError:
            return None
    with ThreadPoolExecutor(8) as pool:
        got = [one for one in pool.map(try_it, range(8)) if one]
    assert len(got) == 1 and read_config(run) == {"number": got[0][0]}


def test_a_new_run_is_held(tmp_path):
    folder, lock = claim_run(str(tmp_path), None, "label", {})
    with lock, pytest.raises(ConfigError):
        lock_run(folder)


def test_runs_without_a_name_never_share_a_folder(tmp_path, monkeypatch):
    second = runs.now()
    monkeypatch.setattr(runs, "now", lambda: second)
    folders = {create_run(str(tmp_path), None, "model-lora", {}) for _ in range(20)}
    assert len(folders) == 20
    digits = iter(["0000", "0000", "0001", "0" * 16, "0" * 16])
    monkeypatch.setattr(runs.secrets, "token_hex", lambda size: next(digits) if size == 2 else "0" * 16)
    assert create_run(str(tmp_path), None, "drawn", {}) != create_run(str(tmp_path), None, "drawn", {})
    assert all(folder.name.startswith(f"model-lora-{second:%Y%m%d-%H%M%S}-") for folder in folders)


def test_of_many_that_want_the_same_name_one_gets_it(tmp_path):
    def try_it(number):
        try:
            return create_run(str(tmp_path), "same", "label", {"number": number}) and number
        except ConfigError:
            return None
    with ThreadPoolExecutor(8) as pool:
        got = [number for number in pool.map(try_it, range(8)) if number is not None]
    assert len(got) == 1 and read_config(tmp_path / "same") == {"number": got[0]}


def test_a_root_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"run.root={tmp_path}/file: cannot make"):
        create_run(str(tmp_path / "file"), "x", "label", {})


def test_a_real_config_survives_the_way_through_the_file(tmp_path):
    config = asdict(compose_config(["data.sets=[{path: a, columns: {prompt: q}}]", "strategy.extra.aio.x=[1]"]))
    folder = create_run(str(tmp_path), None, "x", config)
    assert asdict(compose_config([], read_config(folder))) == config


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=f"run={folder}: no config.yaml there"):
            read_config(folder)


# ---- attempts and status

def test_attempts_are_numbered_and_never_overwritten(run):
    assert [add_attempt(run, {"overrides": [f"gpus={n}"]}) for n in (1, 2, 3)] == [1, 2, 3]
    (run / "attempts" / "001.yaml").unlink()
    assert add_attempt(run, {}) == 4
    for _ in range(7):
        add_attempt(run, {})
    assert add_attempt(run, {"last": True}) == 12
    assert yaml.safe_load((run / "attempts" / "002.yaml").read_text()) == {"overrides": ["gpus=2"]}
    assert runs.read_attempt(run) == {"last": True, "number": 12}
    assert runs.read_attempt(run, 2) == {"overrides": ["gpus=2"], "number": 2}


def test_a_run_that_was_never_started_has_no_attempt(run):
    with pytest.raises(ConfigError, match="was never started"):
        runs.read_attempt(run)


def test_a_file_that_is_written_once_is_not_written_twice(run):
    with pytest.raises(FileExistsError):
        runs._write_new(run / "config.yaml", "seed: 9\n")
    assert read_config(run)["seed"] == 3


def test_the_status_says_what_happened_and_leaves_nothing_beside_it(run):
    write_status(run, "running", "starting", step=0)
    write_status(run, "done", "finished", step=9, exit_code=0)
    status = read_status(run)
    assert {key: status[key] for key in ("state", "message", "step", "exit_code", "pid")} == {
        "state": "done", "message": "finished", "step": 9, "exit_code": 0, "pid": os.getpid()}
    assert not [path for path in run.iterdir() if path.name.startswith(".status")]


def test_a_status_that_cannot_be_written_leaves_the_former_one(run, monkeypatch):
    write_status(run, "running", "step 5", step=5)
    with pytest.raises(TypeError):
        write_status(run, "running", "step 6", step=object())
    assert read_status(run)["step"] == 5
    # a reader meets the old or the new file, never a part: it is the rename that publishes it
    seen = []
    replace = type(run).replace
    monkeypatch.setattr(type(run), "replace", lambda self, to: (
        seen.append((json.loads(self.read_text())["step"], read_status(run)["step"])), replace(self, to))[1])
    write_status(run, "running", "step 7", step=7)
    assert seen == [(7, 5)] and read_status(run)["step"] == 7


# ---- the lock

HOLD = "import sys; from pathlib import Path; from tonnage.runtime.runs import lock_run; " \
       "held = lock_run(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


def test_a_run_is_held_by_one_process_and_let_go_when_it_dies(run):
    write_status(run, "running", "x")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError) as error:
            lock_run(run)
        assert f"run={run}: another process is running it ({os.getpid()})" in str(error.value)
    finally:
        holder.kill()
        holder.communicate()
    with lock_run(run), pytest.raises(ConfigError):
        lock_run(run)
    lock_run(run).close()


# ---- secrets

@pytest.mark.parametrize("name", ["token", "hf_token", "HF_TOKEN", "api_key", "wandb_api_key", "OPENAI_API_KEY", "apikey",
                                  "secret", "client_secret", "password", "db_password"])
def test_tokens_and_keys_are_not_written(tmp_path, name):
    config = {"strategy": {"extra": {name: "s3cr3t", "deep": [{name: ["s3cr3t"]}]}}}
    folder = create_run(str(tmp_path), "x", "x", config)
    add_attempt(folder, config)
    assert read_config(folder)["strategy"]["extra"] == {name: REDACTED, "deep": [{name: [REDACTED]}]}
    assert not [file for file in folder.rglob("*") if file.is_file() and "s3cr3t" in file.read_text()]
    assert config["strategy"]["extra"][name] == "s3cr3t"  # the one in use keeps it


def test_what_only_sounds_like_a_secret_is_written():
    plain = {"data": {"seq_tokens": 2048}, "batch": {"global_tokens": 9}, "model": {"new_tokens": ["<a>", "<b>"]},
             "eval": {"prompt_tokens": 64}, "tokenizer": "x", "keys": "y", "token": None}
    assert redacted(plain) == plain


@pytest.mark.parametrize("file, read", [("status.json", read_status), ("config.yaml", read_config)])
@pytest.mark.parametrize("damage", ["{", "[1]", ""])
def test_a_damaged_file_of_a_run_is_named(tmp_path, file, read, damage):
    run = create_run(str(tmp_path), "one", "label", {"seed": 1})
    (run / file).write_text(damage)
    with pytest.raises(ConfigError, match=rf"run=.*: {file} is damaged"):
        read(run)


def test_a_run_keeps_its_identity_when_it_is_moved(tmp_path):
    run = create_run(str(tmp_path), "one", "label", {"seed": 1})
    before = runs.run_id(run)
    assert runs.run_id(run.rename(tmp_path / "two")) == before
    assert runs.run_id(create_run(str(tmp_path), "one", "label", {"seed": 1})) != before
