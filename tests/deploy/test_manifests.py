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
        for name, file in (("LEASE_S", "generator.py"), ("LOST_S", "crew.py"), ("TAKE_LEAD_S", "crew.py"))
    }
    assert seconds["LEASE_S"] < seconds["LOST_S"] + seconds["TAKE_LEAD_S"] < 3.0


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


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
def test_kustomize_builds_the_base() -> None:
    done = subprocess.run(["kubectl", "kustomize", str(BASE)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    built = [d for d in yaml.safe_load_all(done.stdout) if d]
    assert sorted(d["kind"] for d in built) == [
        "ConfigMap", "Job", "Job", "NetworkPolicy", "PersistentVolumeClaim", "Service",
    ]  # fmt: skip
    (config,) = [d["metadata"]["name"] for d in built if d["kind"] == "ConfigMap"]
    containers = {d["metadata"]["name"]: d["spec"]["template"]["spec"]["containers"][0] for d in built if d["kind"] == "Job"}
    assert containers["bench-master"]["envFrom"] == [{"configMapRef": {"name": config}}]  # with the hash of its content
    assert {c["image"] for c in containers.values()} == {"scheduler-bench:local"}
    assert all(d["metadata"]["labels"]["app.kubernetes.io/part-of"] == "scheduler-bench" for d in built)


# Fields of a LocustTest by the operator's own definition of it; True: a map of strings.
LOCUST_TEST: dict[str, Any] = {
    "image": str, "imagePullPolicy": str, "imagePullSecrets": list, "workers": int, "args": str, "env": list,
    "labels": True, "annotations": True, "locustfile": dict, "metrics": dict,
    "master": {"labels": True, "annotations": True, "resources": dict},
    "worker": {"labels": True, "annotations": True, "resources": dict},
}  # fmt: skip


def check_fields(value: dict[str, Any], fields: dict[str, Any]) -> None:
    assert set(value) <= set(fields), set(value) - set(fields)
    for name, kind in fields.items():
        if name not in value:
            continue
        if kind is True:
            assert all(isinstance(v, str) for v in value[name].values()), name
        elif isinstance(kind, dict):
            check_fields(value[name], kind)
        else:
            assert type(value[name]) is kind, name


def test_the_operator_example_has_the_fields_of_its_resource() -> None:
    (test,) = documents(DEPLOY / "k8s" / "operator" / "locusttest.yaml")
    spec = test["spec"]
    check_fields(spec, LOCUST_TEST)
    assert all(set(each) == {"name", "value"} and isinstance(each["value"], str) for each in spec["env"])
    arguments = spec["args"].split()
    assert arguments[arguments.index("--expect-workers") + 1] == str(spec["workers"])
    # the operator gives these itself; with --headless it would delete the pods, and the run folder, at the end
    assert not {"--master", "--worker", "--master-host", "--headless"} & set(arguments)
    dockerfile = (DEPLOY / "k8s" / "operator" / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall("^ENTRYPOINT (.*)$", dockerfile, re.M) == ['["locust"]']  # it starts the entry point with Locust's options
    assert f"-t {spec['image']} " in dockerfile


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


def test_grafana_is_provisioned_with_what_is_mounted(compose: dict[str, Any]) -> None:
    mounts = dict(m.rsplit(":", 2)[:2] for m in compose["services"]["grafana"]["volumes"] if m.count(":") == 2)
    assert mounts == {
        "./deploy/grafana/provisioning": "/etc/grafana/provisioning",
        "./deploy/grafana/dashboards": "/var/lib/grafana/dashboards",
    }
    source = documents(DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yml")[0]
    provider = documents(DEPLOY / "grafana" / "provisioning" / "dashboards" / "files.yml")[0]
    assert source["apiVersion"] == provider["apiVersion"] == 1
    (prometheus,), (files,) = source["datasources"], provider["providers"]
    assert prometheus["url"] == "http://prometheus:9090" and prometheus["type"] == "prometheus"
    assert {"name", "type", "access", "uid", "isDefault"} <= set(prometheus) and "prometheus" in compose["services"]
    assert files["type"] == "file" and files["options"]["path"] in mounts.values()
    home = compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    path = DEPLOY / "grafana" / "dashboards" / Path(home).name
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    assert home.startswith(files["options"]["path"]) and dashboard["uid"] and dashboard["title"]
    assert dashboard["schemaVersion"] >= 36 and dashboard.get("id") is None  # an id of another Grafana would be refused
    for panel in dashboard["panels"]:
        assert {"id", "type", "title", "gridPos", "targets", "datasource"} <= set(panel), panel["title"]
        place = panel["gridPos"]
        assert set(place) == {"x", "y", "w", "h"} and place["x"] + place["w"] <= 24
        assert len({t["refId"] for t in panel["targets"]}) == len(panel["targets"])
    boxes = [(p["gridPos"], p["title"]) for p in dashboard["panels"]]
    for i, (a, one) in enumerate(boxes):
        for b, two in boxes[i + 1 :]:
            apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"] or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
            assert apart, (one, two)
