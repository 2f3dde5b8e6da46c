"""`draftlab push`: the uploaded folder, its card, and what must not leave the machine."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard, constants

from draftlab.evaluate.results import Report
from draftlab.heads.folder import CONFIG, WEIGHTS
from draftlab.hub.privacy import REMOVED, without_private_values
from tests.helpers.hub_stub import TOKEN, stub_hub
from tests.helpers.small_run import contents, copy_of_finished, draftlab, ran

PUSH = ("push", "small", "org/tiny-head")


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    return copy_of_finished(tmp_path / "workshop")


def dry_run(workshop: Path, *options: str) -> Any:
    return draftlab(workshop, *PUSH, "--dry-run", *options)


def test_a_dry_run_writes_the_folder_and_sends_nothing(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stub_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        result = dry_run(workshop, "--base-model", "org/base", "--license", "apache-2.0")
        assert not hub.requests
    assert result.exit_code == 0, result.output
    folder = workshop / "runs" / "small" / "hub" / "org--tiny-head"
    files = contents(folder)
    assert files.keys() >= {"README.md", "config.json", "model.safetensors", "launch.md"}
    assert "recipe.yaml" in files
    card = ModelCard.load(folder / "README.md")
    assert (card.data.base_model, card.data.license) == ("org/base", "apache-2.0")
    assert "draftlab" in card.data.tags
    report = Report.read(folder / "report.json")
    (row,) = [r for r in report.rows if r.drafter != "none" and r.temperature == 0]
    result = card.data.eval_results[0]
    expected = ("acceptance_length", round(row.acceptance_length, 3))
    assert (result.metric_type, result.metric_value) == expected
    counters = (row.output_tokens, row.drafts, row.draft_tokens, row.accepted)
    assert f"| {' | '.join(map(str, counters))} |" in card.text
    assert "vllm serve org/tiny-head" in card.text
    assert "vllm serve org/base" in card.text
    config = json.loads(files["config.json"])
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/base"


def test_a_pushed_head_can_be_imported(workshop: Path) -> None:
    assert dry_run(workshop, "--out", "out").exit_code == 0
    ran(workshop, "import", "out", "--to", "back", "--target", "toy")
    head = workshop / "runs" / "small" / "head"
    assert (workshop / "back" / WEIGHTS).read_bytes() == (head / WEIGHTS).read_bytes()


def test_a_run_under_another_name_is_pushed(workshop: Path) -> None:
    """Its report has rows of the former name; the hash of the weights tells that they are its."""
    runs = workshop / "runs"
    (runs / "small").rename(runs / "renamed")
    ran(workshop, "push", "renamed", *PUSH[2:], "--dry-run", "--out", "out")
    card = ModelCard.load(workshop / "out" / "README.md")
    assert {one.metric_type for one in card.data.eval_results} == {"acceptance_length"}


def test_a_push_serves_with_the_k_of_an_export(workshop: Path) -> None:
    """It is the fastest that the run's report measured, not the one that the head has."""
    path = workshop / "runs" / "small" / "eval" / "report.json"
    fields = json.loads(path.read_text())
    for row in fields["rows"]:
        if row["drafter"] != "none" and row["temperature"] == 0:
            row |= {"speedup": 1.26, "speedup_ci": [1.13, 1.4]}
    path.write_text(json.dumps(fields))
    line = "export: K = 2 speculative tokens, the only one measured at T = 0 (1.26×)"
    for result in (draftlab(workshop, "export", "--run", "small"), dry_run(workshop)):
        assert line in " ".join(result.output.split())


def test_the_folder_contains_no_path_of_this_machine(workshop: Path) -> None:
    run = workshop / "runs" / "small"
    recipe, report = run / "recipe.yaml", run / "eval" / "report.json"
    recipe.write_text(recipe.read_text().replace("path: toy", f"path: {workshop / 'toy'}"))
    fields = json.loads(report.read_text())
    compared = [str(workshop / name / "head") for name in ("one", "two")]
    fields["rows"] += [row | {"head": name} for row in fields["rows"][1:] for name in compared]
    for row in fields["rows"]:
        row |= {"suite": f"spec-bench:{workshop}/questions.jsonl", "warnings": [f"see {run}/x"]}
    fields["target"]["name"] = str(workshop / "toy")
    fields["environment"]["by_head"] = {name: [] for name in [*compared, str(workshop)]}
    report.write_text(json.dumps(fields))

    result = dry_run(workshop, "--to", "vllm", "--out", "out")
    assert result.exit_code == 0, result.output
    assert "--base-model" in result.output  # a local path is no base model
    for name, data in contents(workshop / "out").items():
        assert str(workshop).encode() not in data, name
        if not name.endswith((".safetensors", ".png")):
            assert not re.search(r"/(tmp|home|root)/", data.decode()), name
    assert ModelCard.load(workshop / "out" / "README.md").data.base_model is None
    launch = (workshop / "out/launch.md").read_text()
    assert "vllm serve TARGET" in launch
    assert "TARGET stands for the folder of the target" in launch
    published = Report.read(workshop / "out" / "report.json")
    assert {row.head for row in published.rows} == {None, "small", "head", "head (2)"}
    assert {row.suite for row in published.rows} == {"spec-bench:questions.jsonl"}
    keys = [*published.environment["by_head"]]
    assert keys == ["head", "head (2)", workshop.name]
    assert [*(workshop / "out").glob("acceptance_by_position*.png")]


def test_private_settings_are_removed_and_named(workshop: Path) -> None:
    path = workshop / "runs" / "small" / "recipe.yaml"
    recipe = yaml.safe_load(path.read_text())
    secrets = ("https://server.internal:8000", "internal-name", "secret-project", "acme")
    recipe["regenerate"]["server"] |= {"url": secrets[0], "model": secrets[1]}
    recipe["train"]["wandb"] = secrets[2]
    recipe["eval"]["suite"] = "clients/acme/questions.jsonl"
    path.write_text(yaml.safe_dump(recipe))
    head = workshop / "runs" / "small" / "head" / CONFIG
    config = json.loads(head.read_text())
    config["provenance"]["source"] = "answers of https://user:password@server.internal:8000/v1"
    head.write_text(json.dumps(config))
    os.utime(head, (0, 0))

    result = dry_run(workshop, "--out", "out")
    assert result.exit_code == 0, result.output
    names = "regenerate.server.url, regenerate.server.model, train.wandb"
    files = contents(workshop / "out")
    for name, data in files.items():
        assert not [secret for secret in (*secrets, "password") if secret.encode() in data], name
    published = yaml.safe_load(files["recipe.yaml"])
    assert published["train"]["wandb"] == published["regenerate"]["server"]["url"] == REMOVED
    assert published["train"]["steps"] == recipe["train"]["steps"]
    for text in (" ".join(result.output.split()), files["README.md"].decode()):
        assert names in text


def test_a_card_says_nothing_about_the_cache_of_this_machine(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTLAB_CACHE", str(workshop))  # as a GGUF file's checkpoint is in it
    assert dry_run(workshop, "--out", "out", "--to", "vllm").exit_code == 0
    files = contents(workshop / "out")
    assert b"vllm serve TARGET" in files["launch.md"]
    assert not [name for name, data in files.items() if b"draftlab's cache" in data]


def test_folders_of_relative_paths_are_removed_everywhere(workshop: Path) -> None:
    """They look like Hub ids, and name clients: a target, prompts, suites, compared heads."""
    (workshop / "acme").mkdir()
    (workshop / "toy").rename(workshop / "acme/model")
    run = workshop / "runs/small"
    names = {"toy": "acme/model", "prompts.jsonl": "acme/prompts.jsonl"}
    for file in (run / "recipe.yaml", run / "eval/report.json", run / "head" / CONFIG):
        text = file.read_text().replace("compare: []", "compare: [acme/head-1, org/other]")
        for old, new in names.items():
            text = re.sub(rf"(?<=[ \"]){old}(?=[\n\",])", new, text)
        file.write_text(text)
    report = run / "eval/report.json"
    fields = json.loads(report.read_text())
    fields["rows"] += [row | {"head": "acme/head-1"} for row in fields["rows"] if row["head"]]
    fields["rows"][0]["warnings"] = ["no tokens in acme/prompts.jsonl; acme/models are others"]
    report.write_text(json.dumps(fields))
    os.utime(run / "head" / CONFIG, (0, 0))

    result = dry_run(workshop, "--out", "out", "--to", "vllm")
    assert result.exit_code == 0, result.output
    files = contents(workshop / "out")
    kept = b"acme/models are others"
    assert not [name for name, data in files.items() if b"acme/" in data.replace(kept, b"")]
    published = yaml.safe_load(files["recipe.yaml"])
    assert published["target"]["path"] == "model"
    assert published["eval"]["compare"] == ["head-1", "other"]
    assert json.loads(files["head.json"])["target"]["name"] == "model"
    assert {row.head for row in Report.read(workshop / "out/report.json").rows} >= {"head-1"}
    refused = dry_run(workshop, "--base-model", "acme/model")
    assert refused.exit_code == 2
    assert "found a folder here: acme/model" in refused.stderr


@pytest.mark.parametrize(
    ("value", "published"),
    [
        ("/home/me/My Files/x", "x"),
        ("~/x/y", "y"),
        ("~nobody-of-this-name/x/y", "y"),
        ("at (/srv/a/b): 3 tokens/s, 1/2, org/name", "at (b): 3 tokens/s, 1/2, org/name"),
        ("s3://key:secret@bucket/x", REMOVED),
        ("</think></s>", "</think></s>"),
        ("../clients/acme/prompts.jsonl", "prompts.jsonl"),
        (
            "trained on ../../clients/acme/a.jsonl, then ./acme/b.jsonl",
            "trained on a.jsonl, then b.jsonl",
        ),
        (r"C:\Users\First Last\head", "head"),
        (r"at C:\Users\me\head and D:/work/me/x", "at head and x"),
        (r"at C:\\Users\\me\\head", "at head"),
        (r"in \\server\share\acme\x", "in x"),
        (r"..\acme\x.jsonl", "x.jsonl"),
        ("gcc -I/home/me/include -L/srv/acme/lib", "gcc -Iinclude -Llib"),
        ("-I/home/me/include", "-Iinclude"),
        (r"cl -IC:\Users\me\include", "cl -Iinclude"),
        ("--prefix=/srv/acme/x PATH=/a/b:/c/d", "--prefix=x PATH=b:d"),
        ("step 3... 1/2 tokens/s, a/b at 5:00", "step 3... 1/2 tokens/s, a/b at 5:00"),
        ({"/a/x": 1, "/b/x": [2.0, None]}, {"x": 1, "x (2)": [2.0, None]}),
    ],
)
def test_paths_and_addresses_are_removed_from_values_and_keys(value: Any, published: Any) -> None:
    assert without_private_values(value) == published


def test_a_push_is_private_and_never_shows_the_token(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with stub_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        result = ran(workshop, *PUSH)
        repo = hub.repos["org/tiny-head"]
        assert repo.private
        assert repo.files == contents(workshop / "runs/small/hub/org--tiny-head")
        assert f"Bearer {TOKEN}" in hub.authorizations
        assert f"{hub.url}/org/tiny-head" in result.output

        hub.refuse = 401
        refused = draftlab(workshop, *PUSH)
    assert refused.exit_code == 2
    assert "hf auth login" in refused.output
    assert TOKEN not in result.output + refused.output
    for name, data in contents(workshop).items():
        assert TOKEN.encode() not in data, name


def test_a_run_without_a_current_report_is_refused(workshop: Path) -> None:
    run = workshop / "runs" / "small"
    os.utime(run / "eval" / "report.json", (1, 1))  # as `cp -r` may leave it
    assert dry_run(workshop).exit_code == 0
    weights = run / "head" / WEIGHTS
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    result = dry_run(workshop)
    assert result.exit_code == 2
    assert "found one of a head with other weights" in result.output
    weights.write_bytes(whole)
    (run / "eval" / "report.json").unlink()
    result = dry_run(workshop)
    assert result.exit_code == 2
    assert "draftlab eval --run small" in result.output


def test_a_folder_with_other_content_is_not_changed(workshop: Path) -> None:
    for _ in range(2):  # its own folder is replaced
        assert dry_run(workshop, "--out", "notes").exit_code == 0
    (workshop / "notes/.git").mkdir()
    (workshop / "notes/.git/HEAD").write_text("ref")
    (workshop / "notes/photo.png").write_text("text")
    before = contents(workshop / "notes")
    result = dry_run(workshop, "--out", "notes")
    assert result.exit_code == 2
    assert "an earlier push, found .git, photo.png" in result.output
    assert contents(workshop / "notes") == before
