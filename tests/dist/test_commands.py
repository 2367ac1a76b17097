"""The commands as a user types them: launchers, resume, sweeps, and what is said when something is wrong."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from tiny import make_chat_model, make_chats

from tonnage.errors import EXIT_STOPPED_RESUMABLE, EXIT_USER_ERROR
from tonnage.runtime.runs import read_status
from tonnage.train.checkpoint import StoredTensors

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny chat model and 20 chats."""
    folder = tmp_path_factory.mktemp("commands")
    make_chat_model(folder / "model")
    make_chats(folder / "chats.jsonl", 20)
    return folder


def run(place, *words, starter=(sys.executable,), script="train.py", env=None):
    """The finished process of `starter launch/script words`."""
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    environment = clean | {"TONNAGE_CACHE": str(place / "cache"), "HF_HUB_OFFLINE": "1"} | (env or {})
    return subprocess.run([*starter, str(ROOT / "launch" / script), *words], capture_output=True, text=True, cwd=place,
                          timeout=240, env=environment)


def tiny(place, *words):
    """Overrides of a run of 4 steps on the tiny model."""
    return ["model=custom", f"model.path={place}/model", "data=files", f"data.path={place}/chats.jsonl", "data.seq_tokens=64",
            f"data.cache={place}/cache", "precision=fp32", "batch.global_rows=5", "tracker=none", f"run.root={place}/outputs",
            *words]


def weights(run_folder):
    stored = StoredTensors(sorted((run_folder / "checkpoints").glob("step-*"))[-1])
    return {name: stored[name] for name in stored.names()}


def near(one, other, tolerance=1e-4):
    return all((one[name] - other[name]).norm() <= tolerance * other[name].norm() for name in other)


@pytest.fixture(scope="module")
def finished(place):
    """A finished run of one rank."""
    done = run(place, *tiny(place, "run.name=finished", "strategy=ddp", "batch.micro_rows=5"))
    assert done.returncode == 0, done.stderr
    return place / "outputs" / "finished"


def test_a_run_folder_says_what_happened(place, finished):
    status = read_status(finished)
    assert status["state"] == "done" and status["step"] == 4 and not status["resumable"]
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert yaml.safe_load((finished / "config.yaml").read_text())["batch"]["global_rows"] == 5
    assert [file.name for file in (finished / "attempts").iterdir()] == ["001.yaml"]
    assert (finished / "logs" / "rank-0.log").is_file()


@pytest.mark.parametrize("name, starter, words", [
    ("one", (sys.executable,), ["gpus=1", "strategy=zero2"]),
    pytest.param("own", (sys.executable,), ["gpus=3", "strategy=fsdp"], marks=pytest.mark.slow),
    ("torchrun", (str(BIN / "torchrun"), "--nproc-per-node", "3"), ["gpus=2", "strategy=zero2"]),
    ("deepspeed", (str(BIN / "deepspeed"),), ["gpus=2"])])
def test_every_launcher_learns_the_same(place, finished, name, starter, words):
    done = run(place, *tiny(place, f"run.name={name}", "batch.micro_rows=1", *words), starter=starter,
               env={"PATH": f"{BIN}:{os.environ['PATH']}"})
    folder = place / "outputs" / name
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_status(folder)["state"] == "done"
    assert [path.name for path in (place / "outputs").glob(f"{name}*")] == [name]
    assert near(weights(folder), weights(finished))
    if name == "torchrun":
        assert "rank 2: not needed for gpus=2; stepping aside" in done.stdout
    if name == "deepspeed":
        layout = yaml.safe_load((folder / "attempts" / "001.yaml").read_text())["layout"]
        assert (layout["strategy"], layout["gpus"]) == ("zero3", 2)


@pytest.mark.slow
def test_ranks_that_share_rows_learn_judge_and_answer_the_same(place):
    make_chats(place / "held_out.jsonl", 4)
    judged = ["run.name=alone", "strategy=fsdp", "batch.micro_rows=1", f"eval.path={place}/held_out.jsonl", "eval.every_steps=2",
              "eval.prompts=[the cat]"]
    alone = run(place, *tiny(place, "gpus=1", *judged))
    shared = run(place, *tiny(place, "gpus=2", *judged, "run.name=shared", "strategy.sequence_gpus=2"))
    assert alone.returncode == shared.returncode == 0, alone.stderr + shared.stderr
    assert "2 ranks to a row" in shared.stdout
    folders = [place / "outputs" / name for name in ("alone", "shared")]
    assert near(weights(folders[1]), weights(folders[0]))
    lines = [[json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in folders]
    found = [[line[name] for line in of_one for name in ("loss", "eval_loss") if name in line] for of_one in lines]
    assert len(found[0]) == 4 + 3 and found[1] == pytest.approx(found[0], rel=1e-4)
    answers = [re.findall(r"  > the cat\n  (.*)", done.stdout) for done in (alone, shared)]
    assert len(answers[0]) == 2 and answers[1] == answers[0]  # before and after


def test_too_few_ranks_is_an_error_that_names_the_fix(place):
    done = run(place, *tiny(place, "gpus=4"), starter=(str(BIN / "torchrun"), "--nproc-per-node", "2"))
    assert done.returncode != 0
    assert "gpus=4: torchrun started 2 ranks; start it with --nproc-per-node 4, or set gpus=2" in done.stderr


def test_a_finished_run_refuses_and_a_changed_one_names_the_fork(place, finished):
    again = run(place, f"run={finished}")
    assert again.returncode == EXIT_USER_ERROR and "is finished" in again.stderr
    changed = run(place, f"run={finished}", "seed=3", "optimizer.learning_rate=0.5")
    assert changed.returncode == EXIT_USER_ERROR
    assert "seed=3: was 0" in changed.stderr and "run.fork=true" in changed.stderr


@pytest.mark.slow
def test_a_fork_starts_from_the_weights_in_a_new_folder(place, finished):
    before = set((place / "outputs").iterdir())
    done = run(place, f"run={finished}", "run.fork=true", "seed=3", "optimizer.learning_rate=1e-9")
    assert done.returncode == 0, done.stderr
    (forked,) = set((place / "outputs").iterdir()) - before
    assert near(weights(forked), weights(finished), 1e-3)
    assert yaml.safe_load((forked / "attempts" / "001.yaml").read_text())["forked_from"]
    again = run(place, f"run={forked}")
    assert again.returncode == EXIT_USER_ERROR and "is finished" in again.stderr  # a run of its own, not forked anew
    forget_after(forked, 0)  # as if it had died before its first checkpoint: it begins with the same weights again
    again = run(place, f"run={forked}")
    assert again.returncode == 0 and near(weights(forked), weights(finished), 1e-3), again.stderr
    forget_after(forked, 0)
    checkpoints = (finished / "checkpoints").rename(finished / "away")
    again = run(place, f"run={forked}")
    checkpoints.rename(finished / "checkpoints")
    assert again.returncode == EXIT_USER_ERROR and "which it was forked from, is gone" in again.stderr


@pytest.mark.slow
def test_a_moved_run_goes_on_and_one_without_a_whole_checkpoint_says_so(place):
    done = run(place, *tiny(place, "run.name=here", "checkpoint.every_steps=1"))
    assert done.returncode == 0, done.stderr
    moved = (place / "outputs" / "here").rename(place / "elsewhere")
    forget_after(moved, 3)
    done = run(place, f"run={moved}")
    assert done.returncode == 0 and "resumed after step 3" in done.stdout, done.stderr
    forget_after(moved, 4)
    for path in (moved / "checkpoints").glob("step-*/trainer.json"):
        path.write_text("{}")
    done = run(place, f"run={moved}")
    assert done.returncode == EXIT_USER_ERROR and "checkpoints can be used" in done.stderr


@pytest.mark.slow
def test_a_sweep_makes_a_run_for_each_point(place):
    done = run(place, "-m", *tiny(place, "train.max_steps=1", "optimizer.learning_rate=1e-4,2e-4",
                                  f"run.root={place}/sweep"))
    assert done.returncode == 0, done.stderr
    rates = [yaml.safe_load(file.read_text())["optimizer"]["learning_rate"] for file in (place / "sweep").glob("*/config.yaml")]
    assert sorted(rates) == [1e-4, 2e-4]


def forget_after(run_folder, step):
    """As if the run had died right behind the checkpoint of `step`."""
    for path in (run_folder / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    (run_folder / "status.json").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("name, words", [
    ("stream", ["data.streaming=true", "data.buffer_rows=6", "train.max_steps=6"]),
    ("stream-packed", ["data.streaming=true", "data.buffer_rows=6", "train.max_steps=6", "data.packing=true"]),
    ("tokens-stream", ["data.streaming=true", "train.max_steps=6", "batch.global_rows=auto", "batch.global_tokens=200"]),
    ("packed", ["data.packing=true", "train.epochs=3", "batch.global_rows=2"])])
def test_a_resume_reads_on_where_it_stopped(place, name, words):
    done = run(place, *tiny(place, f"run.name={name}", "checkpoint.every_steps=1", "checkpoint.keep=99", *words))
    assert done.returncode == 0, done.stderr
    folder = place / "outputs" / name
    expected = weights(folder)
    forget_after(folder, 3)
    done = run(place, f"run={folder}")
    assert done.returncode == 0, done.stderr
    assert "resumed after step 3" in done.stdout
    found = weights(folder)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def stopped_run(place, name, *words):
    """Start a run, send SIGTERM after two steps; (its folder, its status)."""
    process = subprocess.Popen([sys.executable, str(ROOT / "launch" / "train.py"), *tiny(place, f"run.name={name}", *words)],
                               cwd=place, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    folder = place / "outputs" / name
    deadline = time.monotonic() + 120
    while read_status(folder).get("step", 0) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert errors.count("stopping behind this micro-batch with a checkpoint; Ctrl-C again stops now, without one\n") == 1
    status = read_status(folder)
    assert process.returncode == EXIT_STOPPED_RESUMABLE, errors
    assert status["state"] == "stopped" and status["resumable"]
    return folder, status


@pytest.mark.slow
def test_a_stopped_stream_loses_no_window(place):
    words = ["data.streaming=true", "data.buffer_rows=6", "train.max_steps=60", "strategy=ddp"]
    folder, _ = stopped_run(place, "stopped-stream", *words)
    for done in (run(place, f"run={folder}"), run(place, *tiny(place, "run.name=whole-stream", *words))):
        assert done.returncode == 0, done.stderr
    found, expected = weights(folder), weights(place / "outputs" / "whole-stream")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_gpus, was", [(1, "2 x 1 x 3"), (2, "2 x 1 x 5, 2 to a row")])
def test_a_request_to_stop_writes_a_checkpoint_and_the_run_goes_on(place, sequence_gpus, was):
    folder, status = stopped_run(place, f"stopped{sequence_gpus}", "strategy=fsdp", "gpus=2", "batch.micro_rows=1",
                                 "train.epochs=60", f"strategy.sequence_gpus={sequence_gpus}")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{status['step']:08d}"]
    again = run(place, f"run={folder}", "gpus=1", "strategy=ddp", "strategy.sequence_gpus=1")
    assert again.returncode == 0, again.stderr
    assert f"resumed after step {status['step']}" in again.stdout and read_status(folder)["state"] == "done"
    assert f"1 rank x 1 row x 5 steps, was {was}; the global batch is 5 rows as before" in again.stdout


@pytest.mark.parametrize("script", ["train.py", "export.py", "prefetch.py", "demo.py"])
def test_without_its_environment_a_script_says_what_to_activate(script):
    done = subprocess.run([sys.executable, "-E", "-S", str(ROOT / "launch" / script)], capture_output=True, text=True)
    assert done.returncode == EXIT_USER_ERROR and done.stderr.count("\n") == 1
    assert "is not installed in this Python" in done.stderr and "source .venv/bin/activate" in done.stderr


@pytest.mark.parametrize("kind", [pytest.param("adapter", marks=pytest.mark.slow), "merged"])
def test_an_export_loads_and_generates(place, finished, kind):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    done = run(place, f"run={finished}", f"kind={kind}", f"out={place}/{kind}", "dtype=fp32", script="export.py")
    assert done.returncode == 0, done.stderr
    assert "logits within" in done.stdout and "asked 'What is 3 plus 3?', it answers" in done.stdout
    model = AutoModelForCausalLM.from_pretrained(place / ("model" if kind == "adapter" else kind))
    if kind == "adapter":
        model = PeftModel.from_pretrained(model, place / kind)
    prompt = torch.tensor([[5, 6, 7]])
    assert model.generate(input_ids=prompt, max_new_tokens=2, min_new_tokens=2, do_sample=False).shape == (1, 5)
    again = run(place, f"run={finished}", f"out={place}/{kind}", script="export.py")
    assert again.returncode == EXIT_USER_ERROR and "exists" in again.stderr


def test_merged_weights_are_16_bits_only_where_rounding_keeps_what_was_learned(place, finished, monkeypatch):
    from safetensors import safe_open

    from tonnage.train import export

    def dtypes(folder):
        with safe_open(folder / "model.safetensors", "pt") as file:
            return {file.get_tensor(name).dtype for name in file.keys()}

    base, trained, rounded = torch.zeros(1, 2, 2), torch.tensor([[[0.0, 4], [3, 0]]]), torch.tensor([[[0.0, 4], [3, 5]]])
    assert export._lost(rounded, trained, base) == (1.0, 1) and export._lost(trained, trained, base) == (0.0, 0)
    monkeypatch.setattr(export, "ANSWER_TOKENS", 4)
    monkeypatch.setattr(export, "_lost", lambda *_: (0.02, 0))
    done = export.export_run(finished, "merged", out=place / "merged-small")
    assert dtypes(done.folder) == {torch.bfloat16} and done.notes[0].startswith("written in bf16: rounding")
    monkeypatch.setattr(export, "_lost", lambda *_: (0.02, 1))
    done = export.export_run(finished, "merged", out=place / "merged-auto")
    assert dtypes(done.folder) == {torch.float32} and "written in fp32" in done.notes[0]
    done = export.export_run(finished, "merged", dtype="bf16", out=place / "merged-bf16")
    assert dtypes(done.folder) == {torch.bfloat16} and done.notes[0].startswith("warning: rounding to bf16 changes")


def test_the_card_of_an_export_says_what_it_is(place, finished):
    from tonnage.train.export import export_run

    done = export_run(finished, "adapter", out=place / "carded")
    card = (done.folder / "README.md").read_text()
    assert "| steps | 4, each of 5 rows |" in card and "chats.jsonl" in card and "More Information" not in card
    assert f"refers to the base model as {place}/model, a folder of this machine" in card and "base_model:" not in card
    assert "on another machine" in done.notes[0]


@pytest.mark.slow
def test_a_run_of_every_weight_is_exported_and_left_as_it_was_trained(place):
    from tonnage.train.export import export_run

    done = run(place, *tiny(place, "run.name=whole", "adapter=full", "train.max_steps=2", "optimizer.learning_rate=1e-2"))
    assert done.returncode == 0, done.stderr
    done = export_run(place / "outputs" / "whole", out=place / "whole")
    assert "rounding to bf16 changes" in done.notes[0] and done.deviation < 1e-4


@pytest.mark.slow
def test_new_tokens_are_trained_saved_and_exported_with_an_adapter(place):
    from safetensors import safe_open

    done = run(place, *tiny(place, "run.name=tokens", "model.new_tokens=['<|tide|>']", "strategy=zero3", "gpus=2"))
    assert done.returncode == 0, done.stderr
    stored = weights(place / "outputs" / "tokens")
    rows = {name: tensor.shape[0] for name, tensor in stored.items() if "modules_to_save" in name}
    assert len(rows) == 2 and len(set(rows.values())) == 1
    done = run(place, f"run={place}/outputs/tokens", f"out={place}/tokens", script="export.py")
    assert done.returncode == 0, done.stderr
    with safe_open(place / "tokens" / "adapter_model.safetensors", "pt") as file:
        assert any("embed_tokens" in name for name in file.keys())


@pytest.mark.parametrize("change, expected", [
    ("optimizer.learning_rat=1", "optimizer.learning_rat: no such key; did you mean optimizer.learning_rate"),
    ("+optimizer.learning_rat=1", "optimizer.learning_rat: no such key; did you mean optimizer.learning_rate"),
    ("batch.micro_rows=0", "batch.micro_rows=0: must be a whole number of at least 1, or auto"),
    ("model=lama7b", "model=lama7b: no such choice; did you mean llama7b"),
    ("data.path=nothing.jsonl", "nothing.jsonl"),
    ("data.path=empty.jsonl", "empty.jsonl"),
    ("data.path=bad.jsonl", "bad.jsonl:2"),
    ("data.path=long.jsonl", "dropped"),
    ("model.path=/nowhere/model", "model.path=/nowhere/model: no such file or folder"),
    ("model.path=owner/name", "HF_TOKEN"),
    ("batch.accumulation_steps=7", "nearest that agree"),
    ("strategy=zero0 precision=bf16", "precision=bf16: not with strategy=zero0"),
    ("device=cuda", "device=cuda: this machine has no GPU driver"),
])
def test_each_mistake_is_one_clear_error(place, change, expected):
    (place / "empty.jsonl").write_text("")
    good = (place / "chats.jsonl").read_text().splitlines()
    (place / "bad.jsonl").write_text("\n".join([good[0], "{not json", good[1]]))
    prompt = {"messages": [{"role": "user", "content": "cat " * 500}, {"role": "assistant", "content": "yes"}]}
    (place / "long.jsonl").write_text("\n".join([json.dumps(prompt)] * 4))
    before = set((place / "outputs").glob("*"))
    done = run(place, *tiny(place, *change.split(" ")))
    assert done.returncode == EXIT_USER_ERROR, done.stdout + done.stderr
    assert expected in done.stderr and done.stderr.startswith("error: ")
    assert "Traceback" not in done.stdout + done.stderr
    assert set((place / "outputs").glob("*")) == before  # nothing half-made is left


def test_skipped_records_are_named_on_the_screen_and_in_the_log(place):
    good = (place / "chats.jsonl").read_text().splitlines()
    (place / "some-bad.jsonl").write_text("\n".join(good + ["{not json"] * 5))
    done = run(place, *tiny(place, "run.name=skips", "data.path=some-bad.jsonl", "data.on_bad=skip", "train.max_steps=1",
                            "precision=bf16"))
    assert done.returncode == 0, done.stderr
    assert "some-bad.jsonl:23: bad JSON" in done.stdout and "some-bad.jsonl:24" not in done.stdout
    assert "... and 2 more, named in logs/rank-0.log" in done.stdout
    log = (place / "outputs" / "skips" / "logs" / "rank-0.log").read_text()
    assert all(f"skipped a bad record: {place}/some-bad.jsonl:{line}: bad JSON" in log for line in range(21, 26))
    assert "ResourceWarning" not in log
    assert "(LlamaForCausalLM)" in done.stdout and "1: 0.25 epochs of 4 steps" in done.stdout
    assert "precision=fp32 is faster" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("gpus", ["1", "2"])
def test_a_start_that_failed_before_its_first_step_gives_its_name_back(place, gpus):
    words = tiny(place, f"run.name=again{gpus}", f"gpus={gpus}", "train.max_steps=1")
    done = run(place, *words, "checkpoint.keep=1000000000000")  # more than any disk has room for
    folder = place / "outputs" / f"again{gpus}"
    assert done.returncode == EXIT_USER_ERROR and read_status(folder)["state"] == "failed", done.stderr
    assert gpus == "1" or f"no step was taken (log: {folder}/logs/rank-0.log)" in done.stderr
    done = run(place, *words, "checkpoint.keep=1")
    assert done.returncode == 0, done.stderr
    assert read_status(folder)["state"] == "done" and (folder / "attempts" / "002.yaml").is_file()
    assert yaml.safe_load((folder / "config.yaml").read_text())["checkpoint"]["keep"] == 1
    done = run(place, *words, "adapter.targets=[k_proj]")
    assert done.returncode == EXIT_USER_ERROR and "exists; go on with it" in done.stderr


@pytest.mark.slow
def test_broken_weights_are_named_before_anything_is_trained(place):
    broken = place / "broken"
    shutil.copytree(place / "model", broken, dirs_exist_ok=True)
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:3000])
    done = run(place, *tiny(place, f"model.path={broken}"))
    assert done.returncode == EXIT_USER_ERROR and str(broken) in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_disk_is_told_before_the_first_step(place):
    small = place / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine does not allow mounts")
    try:
        done = run(place, *tiny(place, f"run.root={small}", "run.name=full", "adapter=full"))
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
    assert done.returncode == EXIT_USER_ERROR and "do not fit into" in done.stderr
