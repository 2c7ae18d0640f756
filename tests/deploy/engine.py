"""A container engine for the tests that want a real one, or the reason why there is none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
IMAGE = "scheduler-bench:test"
NAMES = ("Dockerfile", ".dockerignore", "docker-compose.yml", "deploy", "requirements.lock", "requirements.txt",
         "pyproject.toml", "README.md", "bench", "engine", "control", "analysis", "reports", "locustfiles", "shapes",
         "configs")  # fmt: skip


def engine_name() -> str:
    """docker, podman, or what BENCH_CONTAINER_ENGINE says."""
    return os.environ.get("BENCH_CONTAINER_ENGINE") or "docker"


def compose_command() -> list[str] | None:
    """`docker compose` or `docker-compose`; None when there is neither."""
    if shutil.which(engine_name()):
        plugin = subprocess.run([engine_name(), "compose", "version"], capture_output=True, check=False)
        if plugin.returncode == 0:
            return [engine_name(), "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


def why_not() -> str:
    """Why no container can be run here; empty when one can."""
    name = engine_name()
    if not shutil.which(name):
        return f"{name} is not installed; install it, or name another one in BENCH_CONTAINER_ENGINE"
    info = subprocess.run([name, "info"], capture_output=True, text=True, check=False)
    if info.returncode:
        return f"`{name} info` fails: start the engine, or point DOCKER_HOST to it ({info.stderr.strip()[-150:]})"
    if compose_command() is None:
        return "neither `docker compose` nor docker-compose is installed"
    return ""


def base_image() -> str | None:
    """The base image to build on: BASE_IMAGE, the default when it is there, or any local Python image."""
    wanted = os.environ.get("BASE_IMAGE")
    said = subprocess.run(
        [engine_name(), "images", "--format", "{{.Repository}}:{{.Tag}}"], capture_output=True, text=True, check=False
    ).stdout.split()
    there = [image for image in said if "python:3" in image]
    return wanted or next((i for i in there if i.startswith("python:3.11-slim")), there[0] if there else None)


def no_base() -> str:
    """Why there is nothing to build on; empty when there is: an engine without a registry may hold no base image."""
    if base_image():
        return ""
    wanted = re.search(r"^ARG BASE_IMAGE=(\S+)", (PROJECT / "Dockerfile").read_text(encoding="utf-8"), re.M)
    assert wanted is not None
    pulled = subprocess.run([engine_name(), "pull", "-q", wanted[1]], capture_output=True, text=True, check=False, timeout=300)
    if pulled.returncode == 0:
        return ""
    return f"{wanted[1]} is not here and cannot be pulled; name a local Python image in BASE_IMAGE ({pulled.stderr.strip()[-150:]})"


def build(folder: Path) -> str:
    """Build the image in a copy of what belongs into it, with wheels of this machine's index; returns its name."""
    context = folder / "context"
    context.mkdir()
    for name in NAMES:
        source = PROJECT / name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, context / name)
    (context / "wheels").mkdir()
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "-d", str(context / "wheels"), "-r",
         str(PROJECT / "requirements.lock"), "setuptools", "wheel"], check=True, capture_output=True, timeout=600,
    )  # fmt: skip
    arguments = [engine_name(), "build", "-q", "-t", IMAGE]
    base = base_image()
    arguments += ["--build-arg", f"BASE_IMAGE={base}"] if base else []
    done = subprocess.run([*arguments, "."], cwd=context, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise AssertionError(f"the image cannot be built: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    return IMAGE
