"""Every command: help opens with an example, docs/cli.md is up to date, nothing heavy is imported, shells complete."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from bench.__main__ import COMMANDS, LazyGroup, main
from tests.repo import write_cli_doc

HEAVY = ("locust", "gevent", "numpy", "pandas", "scipy", "altair", "vl_convert", "pydantic", "jinja2", "rich", "flask")


def python(code: str, *, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=cwd)


def test_docs_cli_is_what_the_commands_say() -> None:
    assert write_cli_doc.PAGE.read_text(encoding="utf-8") == write_cli_doc.text(), (
        "docs/cli.md is old: run python -m tests.repo.write_cli_doc"
    )


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_opens_with_an_example_and_lists_the_flags_of_the_page(name: str) -> None:
    done = CliRunner().invoke(main, [name, "--help"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    at = next((i for i, line in enumerate(lines) if line.strip() == "Example:"), None)
    assert at is not None, f"bench {name} --help has no example"
    assert lines[at + 1].strip().startswith(("bench ", "eval "))
    page = write_cli_doc.PAGE.read_text(encoding="utf-8")
    part = page.split(f"\n## bench {name}", 1)[1].split("\n## ", 1)[0]
    printed = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", done.output.split("Options:", 1)[-1])) - {"--help"}
    assert {flag for flag in re.findall(r"`(--[a-z][a-z0-9-]*)`", part)} <= printed | set(re.findall(r"--[a-z0-9-]+", done.output))
    declared = {o for p in write_cli_doc.load(name).params if isinstance(p, click.Option) and not p.hidden for o in p.opts if o.startswith("--")}
    assert all(f"`{flag}`" in part for flag in declared)


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS), ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys, json\nfrom bench.__main__ import main\n"
        f"try:\n    main({arguments!r}, prog_name='bench')\nexcept SystemExit:\n    pass\n"
        f"print('@' + json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    )
    loaded = json.loads(python(code).stdout.rsplit("@", 1)[1])
    assert loaded == []


def test_commands_that_send_no_load_do_not_load_locust(tmp_path: Path) -> None:
    """Locust patches the whole process when it is imported."""
    (tmp_path / "c.json").write_text('{"model": "m", "base_url": "http://127.0.0.1:9"}', encoding="utf-8")
    calls = [["validate", "c.json"], ["init", "new"], ["report", "new"], ["compare", "new", "new"], ["analyse", "new"]]
    code = (
        "import sys\nfrom bench.__main__ import main\n"
        f"for arguments in {calls!r}:\n"
        "    try:\n        main(arguments, prog_name='bench')\n    except SystemExit:\n        pass\n"
        "    print('@', arguments[0], 'locust' in sys.modules or 'gevent' in sys.modules)"
    )
    said = [line.split()[1:] for line in python(code, cwd=tmp_path).stdout.splitlines() if line.startswith("@ ")]
    assert said == [[call[0], "False"] for call in calls]


def test_a_folder_that_is_not_there_is_said_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    heavy = [name for name in HEAVY if name not in ("pydantic", "rich")]  # a config may be read before
    calls = [["report", "no"], ["compare", "no", "no"], ["analyse", "no"], ["batch-curve", "no", "no"],
             ["calibrate", "no"], ["explain", "no", "1"], ["simulate", "--config", "no.json"], ["validate", "no.json"]]  # fmt: skip
    code = (
        "import sys\nfrom bench.__main__ import main\n"
        f"for arguments in {calls!r}:\n"
        "    try:\n        main(arguments, prog_name='bench')\n"
        "    except SystemExit as end:\n        print('@', arguments[0], end.code)\n"
        f"    print('@', arguments[0], [m for m in {heavy!r} if m in sys.modules])"
    )
    said = [line[2:] for line in python(code, cwd=tmp_path).stdout.splitlines() if line.startswith("@ ")]
    assert said == [text for call in calls for text in (f"{call[0]} 2", f"{call[0]} []")]


def cpu_s(*arguments: str) -> float:
    """CPU seconds of a fresh Python process."""
    code = (
        "import resource, subprocess, sys\n"
        f"subprocess.run([sys.executable, *{list(arguments)!r}], check=True, stdout=subprocess.DEVNULL)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\nprint(used.ru_utime + used.ru_stime)"
    )
    return float(python(code, cwd=write_cli_doc.PAGE.parents[1]).stdout)


def test_validate_starts_in_a_few_times_what_its_two_libraries_take() -> None:
    """The goal is 0.4 s of CPU. As a ratio it holds on any machine: 4.1 when this was written, 5.4 with the threads of
    numpy's linear algebra, 15 with scipy and pandas. The pairs run in turn, so that a busy neighbour slows both."""
    pairs = [
        (cpu_s("-m", "bench", "validate", "configs/demo.json"), cpu_s("-c", "import pydantic, click")) for _ in range(3)
    ]
    ratio = statistics.median(mine for mine, _ in pairs) / statistics.median(base for _, base in pairs)
    assert ratio < 6.5, pairs


def test_validate_starts_no_threads() -> None:
    """numpy's linear algebra starts one per core, which doubles what loading numpy costs; what the user set stays."""
    if not Path("/proc/self/task").is_dir() or (os.cpu_count() or 1) < 2:
        pytest.skip("needs /proc and two cores")
    code = (
        "import os, sys\nfrom bench.__main__ import main\n"
        "try:\n    main(['validate', 'configs/demo.json'], prog_name='bench')\nexcept SystemExit:\n    pass\n"
        "print('@', 'numpy' in sys.modules, len(os.listdir('/proc/self/task')), os.environ.get('OPENBLAS_NUM_THREADS'))"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")}
    for given, kept in (({}, "None"), ({"OPENBLAS_NUM_THREADS": "2"}, "2")):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
                              env={**environment, **given}, cwd=write_cli_doc.PAGE.parents[1])  # fmt: skip
        assert done.stdout.splitlines()[-1] == f"@ True 1 {kept}"


WITHOUT = {
    "completion": {"--json", "--quiet"},  # a script for the shell
    "serve-engine": {"--quiet"},  # one line: where it listens
    "explain": {"--quiet"},  # the story is the result
    "watch": {"--quiet"},  # the lines are the result
}


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_json_and_quiet_or_a_reason(name: str) -> None:
    options = {flag for p in write_cli_doc.load(name).params if isinstance(p, click.Option) for flag in p.opts}
    assert {"--json", "--quiet"} - options == WITHOUT.get(name, set())
    assert ("-q" in options) == ("--quiet" in options)


def test_a_wrong_command_names_the_near_one() -> None:
    done = CliRunner().invoke(main, ["comprae"])
    assert done.exit_code == 2 and "Did you mean 'compare'?" in done.output


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "error: No space left on device; free space"),
        (PermissionError(errno.EACCES, "Permission denied", "/data/x.csv"), "error: /data/x.csv: Permission denied; check"),
    ],
)
def test_what_the_machine_refuses_is_a_sentence(monkeypatch: pytest.MonkeyPatch, error: OSError, words: str) -> None:
    @click.command()
    def refused() -> None:
        raise error

    monkeypatch.setattr(LazyGroup, "get_command", lambda *_: refused)
    done = CliRunner().invoke(main, ["run"])
    assert done.exit_code == 2 and words in done.output and "Traceback" not in done.output


def test_other_errors_of_the_system_are_bugs_and_stay_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def broken() -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "never-checked")

    monkeypatch.setattr(LazyGroup, "get_command", lambda *_: broken)
    assert isinstance(CliRunner().invoke(main, ["run"]).exception, FileNotFoundError)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_that_shell(shell: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["completion", shell])
    assert done.exit_code == 0 and "_BENCH_COMPLETE" in done.output and "bench" in done.output
    binary = shutil.which(shell)
    if binary is None:
        pytest.skip(f"{shell} is not installed: its script was not parsed")
    (tmp_path / "script").write_text(done.output, encoding="utf-8")
    checked = subprocess.run([binary, "-n", str(tmp_path / "script")], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_completion_completes_an_option() -> None:
    environment = {**os.environ, "_BENCH_COMPLETE": "bash_complete", "COMP_WORDS": "bench compare --tol", "COMP_CWORD": "2"}
    done = subprocess.run([sys.executable, "-c", "from bench.__main__ import main; main(prog_name='bench')"],
                          env=environment, capture_output=True, text=True, timeout=30, check=False)  # fmt: skip
    assert done.stdout.strip() == "plain,--tolerance"


def test_init_writes_what_is_not_there_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".env.example").write_text("mine", encoding="utf-8")
    done = CliRunner().invoke(main, ["init", str(tmp_path), "--json"])
    said = json.loads(done.output)
    assert done.exit_code == 0 and sorted(Path(p).name for p in said["written"]) == ["bench.json", "compose.yaml"]
    assert (tmp_path / ".env.example").read_text(encoding="utf-8") == "mine"
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    again = CliRunner().invoke(main, ["init", str(tmp_path)])
    assert again.exit_code == 0 and again.output.count("kept, was there") == 3
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert CliRunner().invoke(main, ["init", str(tmp_path), "--name", "../x.json"]).exit_code == 2


def test_what_init_writes_is_good(tmp_path: Path) -> None:
    CliRunner().invoke(main, ["init", str(tmp_path), "--name", "chat.json", "-q"])
    env = {"BENCH_BASE_URL": "http://127.0.0.1:9", "BENCH_MODEL": "m"}
    done = CliRunner().invoke(main, ["validate", str(tmp_path / "chat.json"), "--json"], env=env)
    assert done.exit_code == 0, done.output
    compose = yaml.safe_load((tmp_path / "compose.yaml").read_text(encoding="utf-8"))
    service = compose["services"]["bench"]
    assert service["secrets"] == ["bench_api_key"] and "chat.json" in service["command"]
    assert service["environment"]["BENCH_API_KEY_FILE"] == "/run/secrets/bench_api_key"
    names = re.findall(r"^(\w+)=", (tmp_path / ".env.example").read_text(encoding="utf-8"), re.MULTILINE)
    assert names == ["BENCH_BASE_URL", "BENCH_MODEL", "BENCH_API_KEY_FILE"]


def test_init_into_a_place_that_cannot_be_written_is_exit_2() -> None:
    done = CliRunner().invoke(main, ["init", "/proc/nowhere"])
    assert done.exit_code == 2 and "choose a folder that can be written" in done.output and "Traceback" not in done.output


def examples() -> list[str]:
    """Every example of every command's help: whole lines, without what stands before `bench`."""
    context = click.Context(main)
    commands = [main, *(main.get_command(context, name) for name in COMMANDS)]
    lines = [line.strip() for command in commands for line in ((command and command.help) or "").splitlines()]
    return sorted({line[line.index("bench ") :] for line in lines if re.match(r"(BENCH_API_KEY=\S+ )?bench \w", line)})


@pytest.mark.parametrize("line", examples())
def test_examples_of_the_help_are_commands_that_parse(line: str) -> None:
    words = line.partition(" > ")[0].split()[1:]
    command = main.get_command(click.Context(main), words[0])
    assert command is not None, line
    try:
        with command.make_context(words[0], words[1:]):  # UsageError for a wrong option, value or number of names
            pass
    except click.BadParameter as error:
        assert re.search(r"Path '(runs|shards)/\S+' does not exist", error.message), line  # the reader's own folder
    shipped = [word for word in words if word.startswith("configs/")]
    assert all((write_cli_doc.PAGE.parents[1] / word).is_file() for word in shipped), line


def test_the_examples_were_found() -> None:
    assert len(examples()) > 40 and {line.split()[1] for line in examples()} >= set(COMMANDS) - {"completion"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("simulate --run old --qps 7", "--qps has no effect beside --run: the old run has its arrivals"),
        ("simulate --run old --seed 3", "--seed has no effect beside --run"),
        ("simulate --trace t.csv --shape ramp", "--shape has no effect beside --trace"),
        ("simulate --compare p.yaml --decisions", "--decisions has no effect beside --compare"),
        ("run --users 4 --qps 10", "--qps has no effect beside --users: a closed loop has no rate"),
        ("run --users 0", "0 is not in the range x>=1"),
        ("run --processes 257", "257 is not in the range 0<=x<=256"),
        ("run --users 4 --shape ramp", "--shape has no effect beside --users"),
    ],
)
def test_an_option_without_effect_is_refused(line: str, said: str) -> None:
    done = CliRunner().invoke(main, line.split())
    assert done.exit_code == 2 and said in done.output


def test_a_setting_of_the_environment_is_no_option_of_the_command_line(tmp_path: Path) -> None:
    """BENCH_QPS_STAGES stays set in many shells: it is not refused, the old run's rates go before it."""
    done = CliRunner().invoke(main, ["simulate", "--run", str(tmp_path / "none")], env={"BENCH_QPS_STAGES": "7"})
    assert done.exit_code == 2 and "no effect" not in done.output and "none" in done.output
