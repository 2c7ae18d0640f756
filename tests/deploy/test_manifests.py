"""Compose, Kubernetes, Prometheus and Grafana files: what they promise, and that their parts name the same things."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.config import load_config
from bench.records.server import SYSTEMS

PROJECT = Path(__file__).resolve().parents[2]
DEPLOY = PROJECT / "deploy"


def documents(path: Path) -> list[dict[str, Any]]:
    return [d for d in yaml.safe_load_all(path.read_text(encoding="utf-8")) if d]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return documents(PROJECT / "docker-compose.yml")[0]


OURS = ("master", "worker", "engine", "report")


def test_profiles_and_roles(compose: dict[str, Any]) -> None:
    profiles = {name: service.get("profiles", []) for name, service in compose["services"].items()}
    assert profiles == {
        "master": [], "worker": [], "engine": ["demo"], "report": ["report"], "prometheus": ["observe"], "grafana": ["observe"],
    }  # fmt: skip
    assert len({str(compose["services"][name]["image"]) for name in OURS}) == 1  # one image for all roles


def test_nothing_of_ours_is_root_or_writable(compose: dict[str, Any]) -> None:
    for name in OURS:
        service = compose["services"][name]
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"] and "10001" in service["user"], name
        assert any(mount.startswith("/tmp") for mount in service["tmpfs"]), name
    dockerfile = (PROJECT / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^USER (.*)$", dockerfile, re.M) == ["10001:10001"]
    assert len(re.findall(r"^FROM \$\{BASE_IMAGE\}", dockerfile, re.M)) == 2


def test_ports_are_on_loopback(compose: dict[str, Any]) -> None:
    files = [compose, documents(DEPLOY / "compose.ui.yml")[0]]
    ports = [port for file in files for service in file["services"].values() for port in service.get("ports", [])]
    assert len(ports) >= 4 and all(str(port).startswith("127.0.0.1:") for port in ports)
    assert compose["networks"]["inner"]["internal"] is True
    assert not any(str(port).endswith(":5557") for port in ports)


def test_the_key_comes_as_a_file_and_stands_nowhere_else(compose: dict[str, Any]) -> None:
    for name in ("master", "worker"):
        service = compose["services"][name]
        assert service["secrets"] == ["api_key"] and service["environment"]["BENCH_API_KEY_FILE"] == "/run/secrets/api_key"
    text = (PROJECT / "docker-compose.yml").read_text(encoding="utf-8")
    assert "BENCH_API_KEY:" not in text and "--api-key " not in text
    example = (PROJECT / ".env.example").read_text(encoding="utf-8")
    assert not re.search(r"^\s*[^#\n]*API_KEY=", example, re.M) and "API_KEY_FILE=" in example
    ignored = (PROJECT / ".gitignore").read_text(encoding="utf-8").split()
    assert ".env" in ignored
    context = (PROJECT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert context[0] == "*" and not any(".env" in line for line in context)  # only what is named goes into the image


def test_workers_are_one_number_and_the_grace_is_longer_than_the_drain(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services["worker"]["scale"] == services["master"]["environment"]["BENCH_WORKERS"] == "${WORKERS:-2}"
    drain = max(load_config(path, env={}).config.sweep.drain_limit_sec for path in
                (PROJECT / "configs" / "scheduler_bench.json", PROJECT / "configs" / "demo.json"))  # fmt: skip
    grace = {name: int(services[name]["stop_grace_period"].rstrip("s")) for name in ("master", "worker")}
    assert grace["worker"] > drain and grace["master"] >= grace["worker"]
    assert all("healthcheck" in services[name] for name in ("master", "worker", "engine"))
    # a worker that is cut off sends nothing more before its arrivals are given away
    seconds = {
        name: float(re.findall(rf"^{name} = ([0-9.]+)", (PROJECT / "locustfiles" / file).read_text(encoding="utf-8"), re.M)[0])
        for name, file in (("LEASE_S", "generator.py"), ("LOST_S", "conductor.py"))
    }
    assert seconds["LEASE_S"] < seconds["LOST_S"]


def test_every_variable_has_a_default() -> None:
    text = (PROJECT / "docker-compose.yml").read_text(encoding="utf-8")
    assert not [v for v in re.findall(r"(?<!\$)\$\{([^}]*)\}", text) if ":-" not in v and not v.startswith("RUN:-")]
    named = {v.partition(":-")[0] for v in re.findall(r"(?<!\$)\$\{([^}]*)\}", text)}
    example = set(re.findall(r"^#? ?([A-Z_]+)=", (PROJECT / ".env.example").read_text(encoding="utf-8"), re.M))
    assert example <= named


# -- Kubernetes --------------------------------------------------------------------------------

BASE = DEPLOY / "k8s" / "base"


def jobs() -> dict[str, dict[str, Any]]:
    found = documents(BASE / "master.yaml") + documents(BASE / "workers.yaml")
    return {d["metadata"]["name"]: d for d in found if d["kind"] == "Job"}


def test_every_resource_of_the_base_is_there() -> None:
    kustomization = documents(BASE / "kustomization.yaml")[0]
    assert set(kustomization["resources"]) | {"kustomization.yaml"} == {p.name for p in BASE.glob("*.yaml")}
    for path in BASE.glob("*.yaml"):
        for document in documents(path):
            assert document["apiVersion"] and document["kind"], path
    assert documents(DEPLOY / "k8s" / "operator" / "locusttest.yaml")[0]["kind"] == "LocustTest"


@pytest.mark.parametrize("name", ["bench-master", "bench-worker"])
def test_pods_are_locked_down_and_away_from_the_target(name: str) -> None:
    job = jobs()[name]
    assert job["apiVersion"] == "batch/v1" and job["spec"]["backoffLimit"] == 0
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["automountServiceAccountToken"] is False
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True and security["seccompProfile"] == {"type": "RuntimeDefault"}
    away = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert away["labelSelector"]["matchLabels"] == {"bench-target": "true"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert container["resources"]["requests"]["cpu"] == "1" and "memory" in container["resources"]["limits"]
    mounts, volumes = {m["name"] for m in container["volumeMounts"]}, {v["name"] for v in pod["volumes"]}
    assert mounts == volumes
    (key,) = [e for e in container["env"] if e["name"] == "BENCH_API_KEY"]
    assert key == {"name": "BENCH_API_KEY", "valueFrom": {"secretKeyRef": {"name": "bench-api-key", "key": "api-key"}}}


def test_the_number_of_workers_is_the_same_everywhere() -> None:
    wanted = dict(line.split("=", 1) for line in (BASE / "run.env").read_text().split())["BENCH_WORKERS"]
    spec = jobs()["bench-worker"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert str(spec["parallelism"]) == str(spec["completions"]) == wanted


# -- Prometheus and Grafana -----------------------------------------------------------------------


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:bench_[a-z0-9_]+|(?:vllm|llm):[a-z0-9_:]+)", text))


def known_names() -> set[str]:
    """Names that our page, the embedded engine's page and our rules give."""
    ours = (PROJECT / "locustfiles" / "observe.py").read_text(encoding="utf-8")
    names = set(re.findall(r'"(bench_[a-z0-9_]+)"', ours))
    names |= {f"{n}_total" for n in names} | {f"{n}{end}" for n in names for end in ("_bucket", "_sum", "_count")}
    engine = (PROJECT / "engine" / "metrics.py").read_text(encoding="utf-8")
    plain = set(re.findall(r'"(?:vllm:)?([a-z_0-9]{6,})"', engine))
    names |= {f"vllm:{n}{end}" for n in plain for end in ("", "_total", "_bucket", "_sum", "_count")}
    return names | {r["record"] for r in rules() if "record" in r}


def rules() -> list[dict[str, Any]]:
    files = documents(DEPLOY / "prometheus" / "prometheus.yml")[0]["rule_files"]
    assert files == ["names.yml", "alerts.yml"]
    return [r for name in files for g in documents(DEPLOY / "prometheus" / name)[0]["groups"] for r in g["rules"]]


def test_dashboard_and_alerts_use_names_that_exist() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "scheduler-bench.json").read_text(encoding="utf-8"))
    used = {name for p in dashboard["panels"] for t in p["targets"] for name in names_in(t["expr"])}
    alerts = [r for r in rules() if "alert" in r]
    used |= {name for r in alerts for name in names_in(str(r["expr"]))}
    # both know our own names alone: another serving system needs new rules in names.yml, nothing else
    assert not [name for name in used if name.startswith("vllm:")]
    used |= {name for r in rules() for name in names_in(str(r["expr"]))} - {"vllm:gpu_cache_usage_perc"}  # of older versions
    assert len(used) > 20 and used <= known_names(), used - known_names()
    assert len({p["id"] for p in dashboard["panels"]}) == len(dashboard["panels"])
    uid = documents(DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yml")[0]["datasources"][0]["uid"]
    assert {p["datasource"]["uid"] for p in dashboard["panels"]} == {uid}


def test_each_serving_system_has_rules_for_what_its_page_tells() -> None:
    """The same names as our own reader of the page, or another number would be on the dashboard than in the report."""
    records = {"running": "llm:requests_running", "waiting": "llm:requests_waiting", "kv_usage": "llm:kv_usage_ratio",
               "preemptions_total": "llm:preemptions:rate1m", "ttft_sum_s": "llm:ttft_seconds_bucket:rate30s"}  # fmt: skip
    for system, columns in SYSTEMS.items():
        for column, record in records.items():
            found = [r["expr"] for r in rules() if r.get("record") == record and r["labels"]["system"] == system]
            assert len(found) == (column in columns), (system, record)
            for name in columns.get(column, [])[:1] if found else []:
                bare = name.partition("{")[0].removesuffix("_sum").replace("sglang:", "sglang[:_]")
                assert bare in found[0], (system, record, bare)
        assert [r for r in rules() if r.get("record") == "llm:service_seconds:mean1m" and r["labels"]["system"] == system]


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (Debian: apt-get install prometheus)")
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "names.yml", "alerts.yml"),
        ("test", "rules", "names.test.yml", "alerts.test.yml"),
    ],
)
def test_promtool_accepts_and_evaluates_the_rules(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
